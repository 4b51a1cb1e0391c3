"""The sort of choices as its definition reads."""

from __future__ import annotations

import torch
from torch import Tensor


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
