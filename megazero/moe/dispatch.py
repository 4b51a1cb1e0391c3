"""Sends each token to the ranks of its chosen experts, and their results back.

Rows are sorted by expert, then by token. A token's result is the weighted sum over its choices, added in fp32
in the order of the choices on the token's rank. So `all_to_all_dispatch` gives the same bits on any number of
ranks; `all_gather_dispatch` sums over ranks and agrees to rounding.
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
class SortedRows:
    """A rank's rows, one for each choice of a token, sorted by expert. Blank rows pad.

    Attributes:
        choice: int64 [m], the index of each row's choice in the flattened [n, k]; -1 for a blank row.
        slots: int64 [n, k], the row of each choice; m if it is dropped.
        counts: int64 [E], number of rows of each expert.
        all_kept: whether every choice has a row.
    """

    choice: Tensor
    slots: Tensor
    counts: Tensor
    all_kept: bool

    @classmethod
    def sort(cls, chosen: Tensor, kept: Tensor | None, experts: int, room: int | None = None) -> SortedRows:
        """Sort the kept choices of chosen [n, k] by expert.

        With `room`, every expert gets this many rows, some of them blank. Otherwise the rows of dropped
        choices come last, and `counts` leaves them out.
        """
        choice, slots, counts = sort_by_expert(chosen, kept, experts, room)
        return cls(choice, slots, counts, kept is None and room is None)

    def first(self, count: int) -> SortedRows:
        """The first `count` rows."""
        if self.all_kept:
            return self
        return SortedRows(self.choice[:count], self.slots.clamp_max(count), self.counts, False)

    def blanked(self) -> SortedRows:
        """All m rows, with dropped choices blank; unlike `first` it needs no count on the host."""
        if self.all_kept:
            return self
        m, kept = len(self.choice), self.counts.sum()
        numbers = torch.arange(m, device=self.choice.device)
        choice, slots = self.choice.where(numbers < kept, -1), self.slots.where(self.slots < kept, m)
        return SortedRows(choice, slots, self.counts, False)


def permute(x: Tensor, rows: SortedRows) -> Tensor:
    """Return the rows [m, h] of x [n, h], sorted by expert; blank rows are zeros."""
    return permuted(x, rows.slots, rows.choice, whole=rows.all_kept)


def combine(outputs: Tensor, weights: Tensor, rows: SortedRows) -> Tensor:
    """Sum the outputs [m, h] of each token's choices, times their weights [n, k]: [n, h]."""
    return gathered_sum(outputs, rows.slots, rows.choice, weights, whole=rows.all_kept)


def _on_host(counts: Tensor, expected: int) -> list[list[int]]:
    """Copy `counts` [m, E] to the host, after a wait; on meta, spread `expected` rows evenly."""
    if counts.is_meta:
        m, experts = counts.shape
        return [[expected * (e + 1) // experts - expected * e // experts for e in range(experts)]] * m
    return counts.tolist()


def _local(x: Tensor, weights: Tensor, rows: SortedRows, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Permute x [n, h], run `compute` on its rows, and combine the results by their weights."""
    return combine(compute(permute(x, rows)), weights, rows)


@dataclass(frozen=True)
class ExpertPlacement:
    """The ranks that compute the experts of a layer.

    Attributes:
        experts: E, the number of experts on all ranks.
        apply: computes this rank's experts.
        group: the ranks that together hold all experts; the ranks that slice an expert are adjacent.
        slices: number of ranks that slice each expert (axis etp); all of them get the same rows.
        room: rows that each expert gets from each rank, padded with blank rows; None for no padding.
        reads_sizes: whether `apply` needs the numbers of rows on the host.
    """

    experts: int
    apply: Callable[[Tensor, Groups], Tensor]
    group: Group
    slices: int
    room: int | None = None
    reads_sizes: bool = True

    @property
    def per_rank(self) -> int:
        """Number of experts on each rank."""
        return self.experts // (self.group.size // self.slices)

    @property
    def first(self) -> int:
        """The first of this rank's experts."""
        return self.group.rank // self.slices * self.per_rank


Dispatch = Callable[[ExpertPlacement, Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
"""(placement, x [n, h], float32 weights [n, k], int64 chosen [n, k], bool kept [n, k] or None) -> [n, h]."""


def all_to_all_dispatch(
    placement: ExpertPlacement, x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor | None
) -> Tensor:
    """A `Dispatch` by all-to-all: rows go to the ranks of their experts, and results come back."""
    group, room = placement.group, placement.room
    rows = SortedRows.sort(chosen, kept, placement.experts, room)
    if group.size == 1:
        if room is not None:
            groups = Groups.even(placement.experts, room, x.device)
        elif placement.reads_sizes:
            (sizes,) = _on_host(rows.counts.unsqueeze(0), chosen.numel())
            groups = Groups.of(sizes, x.device)
            rows = rows.first(groups.rows)
        else:
            rows = rows.blanked()
            groups = Groups.on(rows.counts, len(rows.choice))
        return _local(x, weights, rows, lambda sorted_rows: placement.apply(sorted_rows, groups))
    if room is None:
        table = _on_host(gather_rows(rows.counts.unsqueeze(0), group), chosen.numel())
    else:
        table = [[room] * placement.experts] * group.size
    return _local(x, weights, rows.first(sum(table[group.rank])), partial(_exchanged, placement, table))


def _exchanged(placement: ExpertPlacement, table: Sequence[Sequence[int]], sorted_rows: Tensor) -> Tensor:
    """Send rows to the ranks of their experts and return the results; `table` [ranks, E] counts rows."""
    group, slices, per_rank = placement.group, placement.slices, placement.per_rank
    own_counts, room = table[group.rank], placement.room
    parts = [sum(own_counts[first : first + per_rank]) for first in range(0, placement.experts, per_rank)]
    sent_sizes = [part for part in parts for _ in range(slices)]
    if slices > 1:
        sorted_rows = torch.cat([block for block in sorted_rows.split(parts) for _ in range(slices)])
    here = slice(placement.first, placement.first + per_rank)
    received = [source[here] for source in table]
    totals = [sum(source) for source in received]
    if room is not None:  # all blocks have equal size, so a transpose regroups them
        arrived = exchange_rows(sorted_rows, group, sent_sizes, totals)
        groups = Groups.even(per_rank, group.size * room, arrived.device)
        outputs = placement.apply(_blocks_turned(arrived, group.size, per_rank, room), groups)
        sorted_back = _blocks_turned(outputs, per_rank, group.size, room)
    else:
        by_expert, inverse = _regrouping(received, sorted_rows.device)  # while the rows are on their way
        arrived = exchange_rows(sorted_rows, group, sent_sizes, totals)
        groups = Groups.of([sum(column) for column in zip(*received, strict=True)], arrived.device)
        outputs = placement.apply(chosen_rows(arrived, by_expert, inverse), groups)
        sorted_back = chosen_rows(outputs, inverse, by_expert)
    back = exchange_rows(sorted_back, group, totals, sent_sizes)
    return back if slices == 1 else _summed_slices(back, parts, slices)


def _blocks_turned(rows: Tensor, outer: int, inner: int, room: int) -> Tensor:
    """Transpose (outer, inner) blocks of `room` rows to (inner, outer)."""
    return rows.view(outer, inner, room, -1).transpose(0, 1).reshape(rows.shape)


def _regrouping(received: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The permutation from rows by (source, expert) to rows by (expert, source), and its inverse."""
    experts = len(received[0])
    blocks = Groups.of([size for source in received for size in source], device)
    order, inverse, _ = sort_by_expert(blocks.numbers % experts, None, experts)
    return order, inverse


def _summed_slices(back: Tensor, parts: list[int], slices: int) -> Tensor:
    """Sum the partial results of the `slices` ranks that slice the same experts, in order of rank."""
    blocks = list(back.split([part for part in parts for _ in range(slices)]))
    sums = []
    for first in range(0, len(blocks), slices):
        total = blocks[first]
        for block in blocks[first + 1 : first + slices]:
            total = total + block
        sums.append(total)
    return torch.cat(sums)


def all_gather_dispatch(
    placement: ExpertPlacement, x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor | None
) -> Tensor:
    """A `Dispatch` by all-gather: every rank computes its experts for all tokens; results are summed."""
    group = placement.group
    if group.size == 1:
        return all_to_all_dispatch(placement, x, weights, chosen, kept)
    n = len(x)
    padding = _most_rows(n, group, x.device) - n
    if kept is None:
        kept = torch.ones_like(chosen, dtype=torch.bool)
    if padding:
        x, weights, chosen, kept = (F.pad(t, (0, 0, 0, padding)) for t in (x, weights, chosen, kept))
    chosen = gather_rows(chosen, group)
    first, stop = placement.first, placement.first + placement.per_rank
    here = (chosen >= first) & (chosen < stop) & gather_rows(kept, group)
    rows = SortedRows.sort(chosen, here, placement.experts)
    (counts,) = _on_host(rows.counts.unsqueeze(0), chosen.numel())
    groups = Groups.of(counts[first:stop], x.device)
    everyone, weights = gather_for_parts(x, group), gather_for_parts(weights, group)
    partial_sums = _local(
        everyone, weights, rows.first(groups.rows), lambda rows: placement.apply(rows, groups)
    )
    return reduce_scatter_sequence(partial_sums, group)[:n]


def _most_rows(n: int, group: Group, device: torch.device) -> int:
    """The largest `n` in the group; it differs where ranks trim their sequences to different lengths."""
    most = torch.tensor([n], device=device)
    group.all_reduce(most, "max").wait()
    return n if most.is_meta else int(most)
