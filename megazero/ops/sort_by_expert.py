"""Sorts tokens' choices of experts into rows, by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import DEVICES, CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic
from megazero.ops.native import NATIVE, address, on_native_cpu

# Beyond it, the counts of a block's warps do not fit in shared memory.
MOST_EXPERTS = 1024
# Choices that a block sorts.
BLOCK = 1024
_CHOICES = torch.int64


@dataclass(frozen=True)
class SortFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        few: whether there are so few experts that one block can count their choices.
    """

    few: bool


def sort_by_expert_reference(
    chosen: Tensor, kept: Tensor | None, experts: int, room: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A stable sort of the choices by cell: their expert, or the number `experts` for those without one."""
    there = (chosen >= 0) & (chosen < experts)
    cell = torch.where(there if kept is None else there & kept, chosen, experts).reshape(-1)
    order = cell.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=cell.device)
    counts.scatter_add_(0, cell, torch.ones_like(cell))
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=order.device)
    if room is None:
        return order, slots.view(chosen.shape), counts[:experts]
    within = slots - (counts.cumsum(0) - counts)[cell]
    slots = torch.where((cell < experts) & (within < room), within + cell * room, experts * room)
    choice = slots.new_full((experts * room + 1,), -1)
    choice[slots] = torch.arange(len(slots), device=slots.device)
    return choice[:-1], slots.view(chosen.shape), torch.full_like(counts[:experts], room)


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


def sort_by_expert_cuda(
    chosen: Tensor,
    kept: Tensor | None,
    experts: int,
    room: int | None,
    kernels: KernelLibrary | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sort for at most 1,024 experts on a GPU, in three launches and without a wait."""
    chosen, kept = chosen.contiguous(), None if kept is None else kept.contiguous()
    count = chosen.numel()
    blocks = max(1, -(-count // BLOCK))
    workspace = chosen.new_empty(2 * blocks + 1, experts + 1, dtype=torch.int32)
    choice = chosen.new_empty(count if room is None else experts * room)
    slots, counts = torch.empty_like(chosen), chosen.new_empty(experts)
    sizes = (count, blocks, experts, -1 if room is None else room)
    tensors = (chosen, kept, workspace, choice, slots, counts)
    (kernels or cuda_kernels()).launch("sort_by_expert", *sizes, *tensors)
    return choice, slots, counts


def _examples() -> Iterator[Example]:
    experts, choices = 8, 4 * BLOCK
    chosen = torch.randint(experts, (choices // 2, 2), generator=torch.Generator().manual_seed(0))
    # Counts of each expert and of the choices without one, for each block.
    cells = (experts + 1) * 4
    counts = choices // BLOCK * cells
    moved = {
        "expert_counts": choices * 8 + counts,
        "expert_starts": 2 * counts + cells + experts * 8,
        "expert_rows": 3 * choices * 8 + counts + cells,
    }
    yield Example(
        "sort_by_expert",
        (),
        lambda f: f(chosen, None, experts, None),
        traffic=Traffic(
            lambda dtype: moved,
            {"": _CHOICES},
            {"expert_rows": "a warp's choices are of several experts, whose rows lie apart"},
        ),
    )


SORT_BY_EXPERT: Operator[
    Callable[[Tensor, Tensor | None, int, int | None], tuple[Tensor, Tensor, Tensor]]
] = Operator(
    "sort_by_expert",
    (
        Implementation("native_cpu", sort_by_expert_native_cpu, on_native_cpu(frozenset({_CHOICES}))),
        Implementation("cuda", sort_by_expert_cuda, on_cuda_kernels(frozenset({_CHOICES}), few=True)),
        Implementation("reference", sort_by_expert_reference),
    ),
    tuple(SortFacts(device, _CHOICES, few) for device in DEVICES for few in (False, True)),
    _examples,
    differentiable=False,
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
