"""The public choice of the highest and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator, kinds_of_calls
from megazero.ops.top_k.cuda import MOST_CHOSEN, WIDEST, top_k_cuda
from megazero.ops.top_k.reference import top_k_reference


@dataclass(frozen=True)
class TopKFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        small: whether a warp can hold a row and its chosen columns.
    """

    small: bool


TOP_K: Operator[Callable[[Tensor, int], Tensor]] = Operator(
    "top_k",
    (
        Implementation("cuda", top_k_cuda, on_cuda_kernels(small=True)),
        Implementation("reference", top_k_reference),
    ),
    kinds_of_calls(TopKFacts, small=(False, True)),
)


def top_k(values: Tensor, k: int) -> Tensor:
    """int64 [n, k]: the columns of the k highest of values [n, E], best first.

    Of equal values the lower column comes first, and NaN counts as the highest, so the choice is a function
    of the values on every device. It has no gradient.
    """
    small = values.shape[1] <= WIDEST and k <= MOST_CHOSEN
    return TOP_K.choose(TopKFacts.of(values, small=small)).fn(values, k)
