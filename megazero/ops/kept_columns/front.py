"""The public choice of tokens and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.cuda import cuda_built
from megazero.ops.dispatch import CUDA, DEVICES, CallFacts, Implementation, Operator, where
from megazero.ops.kept_columns.cuda import LONGEST, kept_columns_cuda
from megazero.ops.kept_columns.reference import kept_columns_reference

_KEYS = torch.int64


@dataclass(frozen=True)
class KeptFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        short: whether one block can handle a sequence.
    """

    short: bool


KEPT_COLUMNS: Operator[Callable[[Tensor, int, int], Tensor]] = Operator(
    "kept_columns",
    (
        Implementation("cuda", kept_columns_cuda, where(CUDA, frozenset({_KEYS}), cuda_built, short=True)),
        Implementation("reference", kept_columns_reference),
    ),
    tuple(KeptFacts(device, _KEYS, short) for device in DEVICES for short in (False, True)),
)


def kept_columns(keys: Tensor, length: int, kept: int) -> Tensor:
    """int64 [kept, b], ascending in each column: `kept` of the numbers 0 .. length - 1 for each key.

    Each set of them is equally likely, and a function of the key alone.

    Args:
        keys: int64 [b].
    """
    facts = KeptFacts.of(keys, short=length <= LONGEST)
    return KEPT_COLUMNS.choose(facts).fn(keys, length, kept)
