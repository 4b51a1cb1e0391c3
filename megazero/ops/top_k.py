"""The columns of each row's highest values, equal ones in order: a router's choice (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator, kinds_of_calls
from megazero.ops.example import Example, Traffic

# A warp keeps a row in registers, and each of its lanes one choice.
WIDEST, MOST_CHOSEN = 1024, 32


@dataclass(frozen=True)
class TopKFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        small: whether a warp can hold a row and its chosen columns.
    """

    small: bool


def top_k_reference(values: Tensor, k: int) -> Tensor:
    """int64 [n, k]: column numbers from the highest value of values [n, E] down, equal ones in order."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k]


def top_k_cuda(values: Tensor, k: int, kernels: KernelLibrary | None = None) -> Tensor:
    """The choice for values [n, E] in fp32, fp16 or bf16 on a GPU, E at most 1,024 and k at most 32."""
    values = values.detach().contiguous()
    n, width = values.shape
    chosen = values.new_empty(n, k, dtype=torch.int64)
    (kernels or cuda_kernels()).launch("top_k", values.dtype, n, width, k, values, chosen)
    return chosen


def _examples() -> Iterator[Example]:
    """One expert, some of many, all of them, and more than a warp holds; even values and saturated ones."""
    for n, experts, k in ((5, 4, 2), (1, 1, 1), (7, 65, 8), (0, 4, 2), (3, 33, 33)):
        for scale in (1.0, 6.0):
            # A bf16 number holds no column above 256 exactly.
            call = lambda f, x, k=k: f(x, k).to(x.dtype)  # noqa: E731
            label, own = f"{k} of {(n, experts)} x {scale}", {"small": k <= MOST_CHOSEN}
            yield Example(label, ((n, experts),), call, scale, own)

    def moves(dtype: torch.dtype) -> dict[str, int]:
        return {"top_k": 256 * 128 * dtype.itemsize + 256 * 8 * 8}

    yield Example("top_k", ((256, 128),), lambda f, x: f(x, 8), traffic=Traffic(moves))


TOP_K: Operator[Callable[[Tensor, int], Tensor]] = Operator(
    "top_k",
    (
        Implementation("cuda", top_k_cuda, on_cuda_kernels(small=True)),
        Implementation("reference", top_k_reference),
    ),
    kinds_of_calls(TopKFacts, small=(False, True)),
    _examples,
    differentiable=False,
)


def top_k(values: Tensor, k: int) -> Tensor:
    """int64 [n, k]: the columns of the k highest of values [n, E], best first.

    Of equal values the lower column comes first, and NaN counts as the highest, so the choice is a function
    of the values on every device. It has no gradient.
    """
    facts = TopKFacts.of(values, small=values.shape[1] <= WIDEST and k <= MOST_CHOSEN)
    return TOP_K.choose(facts).fn(values, k)
