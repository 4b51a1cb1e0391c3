"""The random choice of tokens that a layer sees under random-LTD (Yao et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.counter_random import derive
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import DEVICES, CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic

# Beyond it, a block would take longer than a sort by the whole device.
LONGEST = 1 << 16
_KEYS = torch.int64


@dataclass(frozen=True)
class KeptFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        short: whether one block can handle a sequence.
    """

    short: bool


def _token_bits(length: int) -> int:
    """The number of lowest bits of a random number that the token's number replaces."""
    return max(1, (length - 1).bit_length())


def kept_columns_reference(keys: Tensor, length: int, kept: int) -> Tensor:
    """Keep the tokens with the smallest keys, which differ: the low bits of a key are its token's number."""
    numbers = torch.arange(length, device=keys.device).unsqueeze(1)
    bits = derive(keys, numbers)  # [s, b]
    low = _token_bits(length)
    order = (bits >> low << low) | numbers
    least = order.topk(kept, dim=0, largest=False, sorted=False).values
    return (least & ((1 << low) - 1)).sort(dim=0).values


def kept_columns_cuda(keys: Tensor, length: int, kept: int, kernels: KernelLibrary | None = None) -> Tensor:
    """The choice for sequences of at most 65,536 tokens on a GPU, in one launch."""
    keys = keys.contiguous()
    columns = keys.new_empty(len(keys), kept)
    sizes = (len(keys), length, kept, _token_bits(length))
    (kernels or cuda_kernels()).launch("kept_columns", *sizes, keys, columns)
    return columns.t()


def _examples() -> Iterator[Example]:
    samples, length, kept = 4, 1024, 512
    yield Example(
        "kept_columns",
        (),
        lambda f: f(torch.arange(samples), length, kept),
        traffic=Traffic(
            lambda dtype: {"kept_columns": samples * 8 + samples * kept * 8},
            {"": _KEYS},
            {"kept_columns": "where a warp's tokens go depends on how many are kept before them"},
        ),
    )


KEPT_COLUMNS: Operator[Callable[[Tensor, int, int], Tensor]] = Operator(
    "kept_columns",
    (
        Implementation("cuda", kept_columns_cuda, on_cuda_kernels(frozenset({_KEYS}), short=True)),
        Implementation("reference", kept_columns_reference),
    ),
    tuple(KeptFacts(device, _KEYS, short) for device in DEVICES for short in (False, True)),
    _examples,
    differentiable=False,
)


def kept_columns(keys: Tensor, length: int, kept: int) -> Tensor:
    """int64 [kept, b], ascending in each column: `kept` of the numbers 0 .. length - 1 for each key.

    Each set of them is equally likely, and a function of the key alone.

    Args:
        keys: int64 [b].
    """
    facts = KeptFacts.of(keys, short=length <= LONGEST)
    return KEPT_COLUMNS.choose(facts).fn(keys, length, kept)
