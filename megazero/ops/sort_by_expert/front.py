"""The public sort of choices and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.cuda import cuda_built
from megazero.ops.dispatch import CPU, CUDA, DEVICES, CallFacts, Implementation, Operator, where
from megazero.ops.native import NATIVE, address, available
from megazero.ops.sort_by_expert.cuda import MOST_EXPERTS, sort_by_expert_cuda
from megazero.ops.sort_by_expert.reference import sort_by_expert_reference

_CHOICES = torch.int64


@dataclass(frozen=True)
class SortFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        few: whether there are so few experts that one block can count their choices.
    """

    few: bool


def sort_by_expert_native_cpu(
    chosen: Tensor, kept: Tensor | None, experts: int, room: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A counting sort by csrc/sort_by_expert, for any number of experts on CPU."""
    chosen, kept = chosen.contiguous(), None if kept is None else kept.contiguous()
    count = chosen.numel()
    choice = chosen.new_empty(count if room is None else experts * room)
    slots, counts = torch.empty_like(chosen), chosen.new_empty(experts)
    sizes = (count, experts, -1 if room is None else room)
    NATIVE.sort_by_expert(*sizes, *map(address, (chosen, kept, choice, slots, counts)))
    return choice, slots, counts


SORT_BY_EXPERT: Operator[
    Callable[[Tensor, Tensor | None, int, int | None], tuple[Tensor, Tensor, Tensor]]
] = Operator(
    "sort_by_expert",
    (
        Implementation("native_cpu", sort_by_expert_native_cpu, where(CPU, frozenset({_CHOICES}), available)),
        Implementation("cuda", sort_by_expert_cuda, where(CUDA, frozenset({_CHOICES}), cuda_built, few=True)),
        Implementation("reference", sort_by_expert_reference),
    ),
    tuple(SortFacts(device, _CHOICES, few) for device in DEVICES for few in (False, True)),
)


def sort_by_expert(
    chosen: Tensor, kept: Tensor | None, experts: int, room: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of the choices of experts: an expert's rows lie together, in the order of the choices.

    Without `room` there is a row for each choice; the rows of choices that are not kept come last. With
    `room`, each expert has that many rows, some of them blank, and choices that are not kept or find no room
    have no row. A number that no expert has is not kept.

    Args:
        chosen: int64 [n, k], numbers of experts.
        kept: bool [n, k]; None if all are.
        experts: E.
        room: rows of each expert; None for as many as were chosen.

    Returns:
        choice int64 [m], the choice in the flattened `chosen` that each row is for, or -1 for a blank one;
        slots int64 [n, k], the row of each choice, or m if it has none;
        counts int64 [E], the rows of each expert.
    """
    facts = SortFacts.of(chosen, few=experts <= MOST_EXPERTS)
    return SORT_BY_EXPERT.choose(facts).fn(chosen, kept, experts, room)
