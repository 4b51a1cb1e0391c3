"""Brings each token to the experts that were chosen for it, on whichever rank, and their results back.

Rows travel sorted by expert, equal ones in order of token. A result is the weighted sum over a token's
choices in their own order, added in fp32 on the token's rank, so by `all_to_all_dispatch` it has the same
bits on any number of ranks. `all_gather_dispatch` adds up over ranks, so it agrees to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.layers.collectives import (
    exchange_rows,
    gather_for_parts,
    gather_rows,
    reduce_scatter_sequence,
)
from megazero.mpu.group import Group
from megazero.ops.chosen_rows import chosen_rows
from megazero.ops.gathered_sum import gathered_sum
from megazero.ops.grouped_linear import Groups
from megazero.ops.permute import permute as permuted
from megazero.ops.sort_by_expert import sort_by_expert


@dataclass(frozen=True)
class Rows:
    """The rows that a rank's tokens make, sorted by expert.

    Attributes:
        choice: int64 [m], the number of the choice in [n, k] that each row is for; -1 for a blank one.
        slots: int64 [n, k], the row of each choice; m if it has none.
        counts: int64 [E], the rows of each expert.
        all_kept: whether every choice has a row.
    """

    choice: Tensor
    slots: Tensor
    counts: Tensor
    all_kept: bool

    @classmethod
    def sort(cls, chosen: Tensor, kept: Tensor | None, experts: int, room: int | None = None) -> Rows:
        """The rows of the kept choices among chosen [n, k]; with `room`, that many per expert, some blank.

        Without `room`, the rows of choices that are not kept come last, and `counts` leaves them out.
        """
        choice, slots, counts = sort_by_expert(chosen, kept, experts, room)
        return cls(choice, slots, counts, kept is None and room is None)

    def first(self, count: int) -> Rows:
        """The first `count` rows."""
        if self.all_kept:
            return self
        return Rows(self.choice[:count], self.slots.clamp_max(count), self.counts, False)

    def blanked(self) -> Rows:
        """All rows, blank ones where a choice is not kept, for which nobody waits."""
        if self.all_kept:
            return self
        m, kept = len(self.choice), self.counts.sum()
        numbers = torch.arange(m, device=self.choice.device)
        choice, slots = self.choice.where(numbers < kept, -1), self.slots.where(self.slots < kept, m)
        return Rows(choice, slots, self.counts, False)


def permute(x: Tensor, rows: Rows) -> Tensor:
    """The rows [m, h] of x [n, h], sorted by expert; blank ones are zeros."""
    return permuted(x, rows.slots, rows.choice, whole=rows.all_kept)


def combine(outputs: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """The sums over each token's choices, times their weights: outputs [m, h], weights [n, k] -> [n, h]."""
    return gathered_sum(outputs, rows.slots, rows.choice, weights, whole=rows.all_kept)


def _on_host(counts: Tensor, expected: int) -> list[list[int]]:
    """`counts` [m, E] as lists, after a wait for the device; on meta, `expected` rows each, spread evenly."""
    if counts.is_meta:
        m, experts = counts.shape
        return [[expected * (e + 1) // experts - expected * e // experts for e in range(experts)]] * m
    return counts.tolist()


def _local(x: Tensor, weights: Tensor, rows: Rows, through: Callable[[Tensor], Tensor]) -> Tensor:
    """Permute x [n, h], run `through` on its rows, and combine the results by their weights."""
    return combine(through(permute(x, rows)), weights, rows)


@dataclass(frozen=True)
class ExpertPlacement:
    """The ranks that compute the experts of a layer.

    Attributes:
        experts: E, on all ranks together.
        apply: computes this rank's experts.
        group: the ranks that hold all experts; those that share each part of them are neighbours.
        slices: how many ranks share each expert; each gets the same rows.
        room: rows that each expert gets from each rank, blank ones among them; None: as many as were chosen.
        reads_sizes: whether `apply` needs the numbers of rows on the host.
    """

    experts: int
    apply: Callable[[Tensor, Groups], Tensor]
    group: Group
    slices: int
    room: int | None = None
    reads_sizes: bool = True

    @property
    def each(self) -> int:
        """Number of experts on a rank."""
        return self.experts // (self.group.size // self.slices)

    @property
    def first(self) -> int:
        """The first of this rank's experts."""
        return self.group.rank // self.slices * self.each


Dispatch = Callable[[ExpertPlacement, Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""(placement, x [n, h], float32 weights [n, k], int64 chosen [n, k], bool kept [n, k] or None) -> [n, h]."""


def all_to_all_dispatch(
    experts_placement: ExpertPlacement, x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor | None
) -> Tensor:
    """A `Dispatch` that sends rows to the ranks of their experts and gets the results back (all-to-all)."""
    group, room = experts_placement.group, experts_placement.room
    rows = Rows.sort(chosen, kept, experts_placement.experts, room)
    if group.size == 1:
        if room is not None:
            groups = Groups.even(experts_placement.experts, room, x.device)
        elif experts_placement.reads_sizes:
            (sizes,) = _on_host(rows.counts.unsqueeze(0), chosen.numel())
            groups = Groups.of(sizes, x.device)
            rows = rows.first(groups.rows)
        else:
            rows = rows.blanked()
            groups = Groups.on(rows.counts, len(rows.choice))
        return _local(x, weights, rows, lambda sorted_rows: experts_placement.apply(sorted_rows, groups))
    if room is None:
        table = _on_host(gather_rows(rows.counts.unsqueeze(0), group), chosen.numel())
    else:
        table = [[room] * experts_placement.experts] * group.size
    through = partial(_exchanged, experts_placement, table)
    return _local(x, weights, rows.first(sum(table[group.rank])), through)


def _exchanged(
    experts_placement: ExpertPlacement, table: Sequence[Sequence[int]], sorted_rows: Tensor
) -> Tensor:
    """The results of this rank's rows from the ranks of their experts; `table` [ranks, E] counts all rows."""
    group, slices, per_rank = experts_placement.group, experts_placement.slices, experts_placement.each
    mine, room = table[group.rank], experts_placement.room
    parts = [sum(mine[first : first + per_rank]) for first in range(0, experts_placement.experts, per_rank)]
    sent_sizes = [part for part in parts for _ in range(slices)]
    if slices > 1:
        sorted_rows = torch.cat([block for block in sorted_rows.split(parts) for _ in range(slices)])
    here = slice(experts_placement.first, experts_placement.first + per_rank)
    received = [source[here] for source in table]
    totals = [sum(source) for source in received]
    if room is not None:  # blocks of equal size change places
        arrived = exchange_rows(sorted_rows, group, sent_sizes, totals)
        groups = Groups.even(per_rank, group.size * room, arrived.device)
        outputs = experts_placement.apply(_blocks_turned(arrived, group.size, per_rank, room), groups)
        sorted_back = _blocks_turned(outputs, per_rank, group.size, room)
    else:
        by_expert, inverse = _regrouping(received, sorted_rows.device)  # made before they arrive
        arrived = exchange_rows(sorted_rows, group, sent_sizes, totals)
        groups = Groups.of([sum(column) for column in zip(*received, strict=True)], arrived.device)
        outputs = experts_placement.apply(chosen_rows(arrived, by_expert, inverse), groups)
        sorted_back = chosen_rows(outputs, inverse, by_expert)
    back = exchange_rows(sorted_back, group, totals, sent_sizes)
    return back if slices == 1 else _summed_slices(back, parts, slices)


def _blocks_turned(rows: Tensor, outer: int, inner: int, room: int) -> Tensor:
    """Rows by (outer, inner) blocks of `room`, in the order of (inner, outer) blocks."""
    return rows.view(outer, inner, room, -1).transpose(0, 1).reshape(rows.shape)


def _regrouping(received: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The order that sorts rows by source, then expert, into rows by expert, then source; and its inverse."""
    experts = len(received[0])
    blocks = Groups.of([size for source in received for size in source], device)
    order, inverse, _ = sort_by_expert(blocks.numbers % experts, None, experts)
    return order, inverse


def _summed_slices(back: Tensor, parts: list[int], slices: int) -> Tensor:
    """The sums over the slices of each part's blocks, in order."""
    blocks = list(back.split([part for part in parts for _ in range(slices)]))
    sums = []
    for first in range(0, len(blocks), slices):
        total = blocks[first]
        for block in blocks[first + 1 : first + slices]:
            total = total + block
        sums.append(total)
    return torch.cat(sums)


def all_gather_dispatch(
    experts_placement: ExpertPlacement, x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor | None
) -> Tensor:
    """A `Dispatch` by all-gather: every rank computes its experts for all tokens, and results are summed."""
    group = experts_placement.group
    if group.size == 1:
        return all_to_all_dispatch(experts_placement, x, weights, chosen, kept)
    n = len(x)
    more = _most_rows(n, group, x.device) - n
    if kept is None:
        kept = torch.ones_like(chosen, dtype=torch.bool)
    if more:
        x, weights, chosen, kept = (F.pad(rows, (0, 0, 0, more)) for rows in (x, weights, chosen, kept))
    chosen = gather_rows(chosen, group)
    here = (
        (chosen >= experts_placement.first)
        & (chosen < experts_placement.first + experts_placement.each)
        & gather_rows(kept, group)
    )
    rows = Rows.sort(chosen, here, experts_placement.experts)
    mine = _on_host(rows.counts.unsqueeze(0), chosen.numel())[0][
        experts_placement.first : experts_placement.first + experts_placement.each
    ]
    everyone, weights = gather_for_parts(x, group), gather_for_parts(weights, group)
    groups = Groups.of(mine, x.device)
    partial_sums = _local(
        everyone, weights, rows.first(groups.rows), lambda rows: experts_placement.apply(rows, groups)
    )
    return reduce_scatter_sequence(partial_sums, group)[:n]


def _most_rows(n: int, group: Group, device: torch.device) -> int:
    """The largest number of rows on any member, as sequences may be trimmed to other lengths there."""
    most = torch.tensor([n], device=device)
    group.all_reduce(most, "max").wait()
    return n if most.is_meta else int(most)
