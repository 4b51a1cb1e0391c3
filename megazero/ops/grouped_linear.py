"""Products of groups of rows with a matrix each, as experts need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.ops.dispatch import CUDA, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.example import Example

_ALIGNED = 16  # bytes that torch's grouped product wants rows to be multiples of


@dataclass(frozen=True)
class GroupedFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        aligned: whether the rows of all operands are whole multiples of 16 bytes.
    """

    aligned: bool


def grouped_linear_reference(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Row r of group e is x[r] weight[e].T, [R, n]."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    for rows, out, matrix in zip(x.split(list(sizes)), y.split(list(sizes)), weight, strict=True):
        torch.mm(rows, matrix.t(), out=out)
    return y


def grouped_outer_reference(grad: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Matrix e is grad_e.T x_e over the rows of group e, [E, n, K]; zeros for an empty group."""
    outer = x.new_empty(len(sizes), grad.shape[1], x.shape[1])
    for left, right, out in zip(grad.split(list(sizes)), x.split(list(sizes)), outer, strict=True):
        torch.mm(left.t(), right, out=out)
    return outer


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


def _cases() -> Iterator[tuple[tuple[int, ...], int, int, dict[str, bool]]]:
    """Groups of uneven sizes, empty ones first, last and among others, and one group of all rows."""
    for sizes in ((3, 1, 4), (0, 5, 0, 0, 2, 0), (7,), (0,), (0, 0, 0), (1,) * 9, (129, 0, 3)):
        for n, k in ((8, 16), (5, 3), (1, 1), (67, 40)):
            # Rows of an odd number of elements are whole multiples of 16 bytes in no dtype.
            yield sizes, n, k, {"aligned": n % 8 == 0 and k % 8 == 0}


def _linear_examples() -> Iterator[Example]:
    for sizes, n, k, own in _cases():
        shapes, label = ((sum(sizes), k), (len(sizes), n, k)), f"{sizes} {n=} {k=}"
        plain = lambda f, x, w, sizes=sizes: f(x, w, sizes)  # noqa: E731
        turned = lambda f, x, w, sizes=sizes: f(x, w.mT.contiguous().mT, sizes)  # noqa: E731
        for call, kind in ((plain, ""), (turned, " transposed")):
            yield Example(label + kind, shapes, call, own=own)


def _outer_examples() -> Iterator[Example]:
    for sizes, n, k, own in _cases():
        shapes, call = ((sum(sizes), n), (sum(sizes), k)), lambda f, *a, sizes=sizes: f(*a, sizes)
        yield Example(f"{sizes} {n=} {k=}", shapes, call, own=own)


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
    _linear_examples,
    differentiable=False,
)
GROUPED_OUTER: Operator[Callable[[Tensor, Tensor, Sequence[int]], Tensor]] = Operator(
    "grouped_outer",
    (
        Implementation("torch", _grouped_mm_outer, _ON_CUDA),
        Implementation("reference", grouped_outer_reference),
    ),
    _CALLS,
    _outer_examples,
    differentiable=False,
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
