"""The public grouped products, and their tables of implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.ops.dispatch import CUDA, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.grouped_linear.reference import grouped_linear_reference, grouped_outer_reference

_ALIGNED = 16  # bytes that torch's grouped product wants rows to be multiples of


@dataclass(frozen=True)
class GroupedFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        aligned: whether the rows of all operands are whole multiples of 16 bytes.
    """

    aligned: bool


def _facts(x: Tensor, weight: Tensor) -> GroupedFacts:
    widths = (x.shape[-1], weight.shape[-1], weight.shape[-2])
    return GroupedFacts.of(x, aligned=all(w * x.element_size() % _ALIGNED == 0 for w in widths))


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    return ends.to(device, non_blocking=True)


def _grouped_mm(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    return F.grouped_mm(x, weight.transpose(1, 2), offs=_ends(sizes, x.device))


def _grouped_mm_outer(grad: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    return F.grouped_mm(grad.t(), x, offs=_ends(sizes, x.device))


# On CPU, torch's own grouped product is a loop too; other dtypes on CUDA take its slow path.
_ON_CUDA = where(CUDA, frozenset({torch.bfloat16}), lambda: hasattr(F, "grouped_mm"), aligned=True)
_CALLS = kinds_of_calls(GroupedFacts, aligned=(False, True))
GROUPED_LINEAR: Operator[Callable[[Tensor, Tensor, Sequence[int]], Tensor]] = Operator(
    "grouped_linear",
    (
        Implementation("torch", _grouped_mm, _ON_CUDA),
        Implementation("reference", grouped_linear_reference),
    ),
    _CALLS,
)
GROUPED_OUTER: Operator[Callable[[Tensor, Tensor, Sequence[int]], Tensor]] = Operator(
    "grouped_outer",
    (
        Implementation("torch", _grouped_mm_outer, _ON_CUDA),
        Implementation("reference", grouped_outer_reference),
    ),
    _CALLS,
)


def grouped_linear(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Multiply consecutive groups of the rows of x [R, K] by weight [E, n, K]: [R, n]. It has no backward.

    Args:
        x: the rows; those of group e come after those of group e - 1.
        weight: one matrix for each group.
        sizes: the number of rows of each of the E groups, on the host; their sum is R.
    """
    return GROUPED_LINEAR.choose(_facts(x, weight)).fn(x, weight, sizes)


def grouped_outer(grad: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient of `grouped_linear`'s weight, [E, n, K], from grad [R, n] and x [R, K]."""
    facts = GroupedFacts.of(x, aligned=all(t.shape[-1] * t.element_size() % _ALIGNED == 0 for t in (grad, x)))
    return GROUPED_OUTER.choose(facts).fn(grad, x, sizes)
