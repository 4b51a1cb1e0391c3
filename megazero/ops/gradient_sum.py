"""Gradients added to their sums: many parameters in one launch, since a model has many small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator, kinds_of_calls
from megazero.ops.example import Example, Traffic
from megazero.ops.segments import lengths_of


@dataclass(frozen=True)
class SumFacts(CallFacts):
    """The facts of a gradient.

    Attributes:
        known: whether its sum is in fp32 or of its dtype, and both are contiguous.
    """

    known: bool


class Summand(NamedTuple):
    """A gradient, the sum that it is added to, and whether it begins the sum, whatever that holds so far."""

    total: Tensor
    gradient: Tensor
    begins: bool


@torch.no_grad()
def gradient_sum_reference(summands: Sequence[Summand]) -> None:
    """``total += gradient``, or ``total = gradient``, one after the other."""
    for one in summands:
        if one.begins:
            one.total.copy_(one.gradient)
        else:
            one.total.add_(one.gradient)


@torch.no_grad()
def gradient_sum_cuda(summands: Sequence[Summand], kernels: KernelLibrary | None = None) -> None:
    """All gradients in one launch: those of one dtype, whose sums are of one dtype."""
    totals, gradients, begin = zip(*summands, strict=True)
    befores = [None if begins else total for total, begins in zip(totals, begin, strict=True)]
    lists = (lengths_of(totals, gradients), totals, gradients, befores)
    dtypes = gradients[0].dtype, totals[0].dtype
    (kernels or cuda_kernels()).launch("gradient_sum", *dtypes, len(summands), *lists)


def _examples() -> Iterator[Example]:
    n = 1 << 17

    def moves(dtype: torch.dtype) -> dict[str, int]:
        """A gradient, and its fp32 sum both ways."""
        return {"gradient_sum": n * (dtype.itemsize + 8)}

    call = lambda f, x: f([Summand(torch.zeros(n), x, begins=False)])  # noqa: E731
    yield Example("gradient_sum", ((n,),), call, traffic=Traffic(moves))


GRADIENT_SUM: Operator[Callable[[Sequence[Summand]], None]] = Operator(
    "gradient_sum",
    (
        Implementation("cuda", gradient_sum_cuda, on_cuda_kernels(known=True)),
        Implementation("reference", gradient_sum_reference),
    ),
    kinds_of_calls(SumFacts, known=(False, True)),
    _examples,
    differentiable=False,
)


def adds_together(device: str) -> bool:
    """Whether it pays on a type of device to add a gradient together with others, a little later."""
    return GRADIENT_SUM.choose(SumFacts(device, torch.float32, known=True)).fn is gradient_sum_cuda


def gradient_sum(summands: Sequence[Summand]) -> None:
    """Add each gradient to its sum, or begin the sum with it; no two have one sum."""
    kinds: dict[tuple[int, torch.dtype, torch.dtype, bool], list[Summand]] = {}
    for one in summands:
        total, gradient, _ = one
        contiguous = total.is_contiguous() and gradient.is_contiguous()
        kind = gradient.get_device(), gradient.dtype, total.dtype, contiguous
        kinds.setdefault(kind, []).append(one)
    for (_, dtype, wide, contiguous), alike in kinds.items():
        facts = SumFacts.of(alike[0].gradient, known=contiguous and wide in (torch.float32, dtype))
        GRADIENT_SUM.choose(facts).fn(alike)
