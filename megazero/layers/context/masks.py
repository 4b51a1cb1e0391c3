"""`PairMasks`: which runs of queries attend to which runs of keys, and with what mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megazero.layers.inputs import Attends, Watch
from megazero.layers.rows import chosen_runs
from megazero.ops.attention import (
    ALL,
    CAUSAL,
    AttentionCall,
    BlockLayout,
    Documents,
    Part,
    Slopes,
    Softcap,
)
from megazero.ops.dropout import AttentionDropout
from megazero.ops.positions import Positions, position_tensor


@dataclass(frozen=True)
class Pair:
    """One attention call: a run of queries, a run of keys, and their mask."""

    queries: slice
    keys: slice
    call: AttentionCall


@dataclass(frozen=True, eq=False)
class PairMasks:
    """The masks of one layer's attention over a sequence whose columns are spread over ranks in runs.

    They are equal on all ranks, so a rank that sends keys knows which ranks need them.

    Attributes:
        attends: the layer's settings.
        scale: the factor of the products of queries and keys.
        bias: linear biases by distance, or a bound of the scores; None without.
        documents: of [b, s]; None without.
        dropout: over all rows; None without.
        watch: sees the calls of this pass; None: nobody does.
    """

    attends: Attends
    scale: float
    bias: Slopes | Softcap | None = None
    documents: Documents | None = None
    dropout: AttentionDropout | None = None
    watch: Watch | None = None

    def see(self, q: Tensor, k: Tensor, call: AttentionCall) -> None:
        """Show a call to whoever watches this pass."""
        if self.watch is not None:
            self.watch(q, k, call)

    def of_heads(self, heads: range) -> PairMasks:
        """The masks of some of the heads."""
        attends, bias, dropout = self.attends, self.bias, self.dropout
        layout = attends.pattern.layout
        if layout is not None and len(layout.blocks) > 1:
            layout = BlockLayout(layout.blocks[heads.start : heads.stop], layout.size)
            attends = replace(attends, pattern=replace(attends.pattern, layout=layout))
        if isinstance(bias, Slopes):
            bias = Slopes(bias.by_head[heads.start : heads.stop])
        if dropout is not None:
            dropout = replace(dropout, head_offset=dropout.head_offset + heads.start)
        return replace(self, attends=attends, bias=bias, dropout=dropout)

    def pairs(self, mine: tuple[range, ...], theirs: tuple[range, ...], *, fused: bool = True) -> list[Pair]:
        """The calls that queries of the columns `mine` make with keys of the columns `theirs`.

        fused: whether calls may be merged where possible; otherwise each is of one run of queries and one of
        keys.
        """
        if not theirs:
            return []
        q_starts, k_starts = _starts(mine), _starts(theirs)
        if self._plain and fused:
            one = self._fused(mine, theirs)
            if one is not None:
                return [one]
        return [
            Pair(slice(q_start, q_start + len(q)), slice(k_start, k_start + len(k)), self.call(q, k))
            for q, q_start in zip(mine, q_starts, strict=True)
            for k, k_start in zip(theirs, k_starts, strict=True)
            if self.seen(q, k)
        ]

    def needed(self, mine: tuple[range, ...], theirs: tuple[range, ...]) -> tuple[range, ...]:
        """The columns of `theirs` that any query of `mine` may attend to, in no more runs than `theirs`."""
        hulls = []
        for keys in theirs:
            seen = [part for queries in mine if (part := self.seen(queries, keys))]
            if seen:
                hulls.append(range(min(part.start for part in seen), max(part.stop for part in seen)))
        return tuple(hulls)

    def seen(self, queries: range, keys: range) -> range:
        """The columns of one run from the first to the last that any query of another run may attend to."""
        pattern = self.attends.pattern
        (left, right), layout = pattern.sides(self.attends.causal), pattern.layout
        start, stop = keys.start, keys.stop
        in_prefix = max(queries.start, keys.start) < pattern.prefix
        if right >= 0 and not in_prefix:
            stop = min(stop, queries.stop + right)
        if left >= 0 and not (pattern.sinks and (keys.start < pattern.sinks or self.documents is not None)):
            start = max(start, queries.start - left)
        if layout is not None:
            rows = slice(queries.start // layout.size, (queries.stop - 1) // layout.size + 1)
            first = start // layout.size
            blocks = layout.blocks[:, rows, first : -(-stop // layout.size)].any(1).any(0).nonzero().flatten()
            if blocks.numel() == 0:
                return range(0)
            start = max(start, (first + int(blocks[0])) * layout.size)
            stop = min(stop, (first + int(blocks[-1]) + 1) * layout.size)
        if start >= stop:
            return range(0)
        keys = range(start, stop)
        return keys if self.documents is None else self.documents.hull(queries, keys)

    @cached_property
    def _plain(self) -> bool:
        return self.attends.pattern == ALL and self.bias is None and self.documents is None

    def _fused(self, mine: tuple[range, ...], theirs: tuple[range, ...]) -> Pair | None:
        """One call for all pairs, if causality alone masks and what it leaves is a rectangle or this rank's
        triangle.
        """
        if not self.attends.causal or mine == theirs:
            pattern = CAUSAL if self.attends.causal else ALL
            call = AttentionCall(self.scale, dropout=self._dropout_of(mine, theirs), pattern=pattern)
            return Pair(_all(mine), _all(theirs), call)
        queries = [q for q in mine if any(self.seen(q, k) for k in theirs)]
        keys = [k for k in theirs if any(self.seen(q, k) for q in mine)]
        if not all(k.stop <= q.start for q in queries for k in keys):
            return None
        first_q, first_k = (runs.index(some[0]) for runs, some in ((mine, queries), (theirs, keys)))
        call = AttentionCall(self.scale, dropout=self._dropout_of(tuple(queries), tuple(keys)))
        return Pair(_run(mine, first_q, queries), _run(theirs, first_k, keys), call)

    def call(self, queries: range, keys: range) -> AttentionCall:
        """The call of a run of queries with a run of keys."""
        documents, pattern, place = self.documents, self.attends.pattern, None
        ends_alike = keys.stop == queries.stop and keys.start <= queries.start
        if not ends_alike or keys.start > 0:
            place = Part(queries.start, keys.start)
        if documents is not None:
            if place is not None and not ends_alike:
                place = replace(place, query_ids=documents.part(queries).ids)
            if place is not None and pattern.sinks:
                place = replace(place, begins=documents.bounds[0][:, keys.start : keys.stop])
            documents = documents.part(keys)
        dropout, pattern = self._dropout_of((queries,), (keys,)), pattern.causally(self.attends.causal)
        return AttentionCall(
            self.scale, documents=documents, bias=self.bias, dropout=dropout, pattern=pattern, part=place
        )

    def _dropout_of(self, queries: tuple[range, ...], keys: tuple[range, ...]) -> AttentionDropout | None:
        dropout = self.dropout
        if dropout is None:
            return None
        own_keys = dropout.keys
        return replace(
            dropout,
            keys=own_keys if own_keys.dim() == 1 else chosen_runs(own_keys, queries),
            query_positions=_at(dropout.query_positions, queries, own_keys.device),
            key_positions=_at(dropout.key_positions, keys, own_keys.device),
        )


def _starts(runs: tuple[range, ...]) -> list[int]:
    starts = [0]
    for run in runs[:-1]:
        starts.append(starts[-1] + len(run))
    return starts


def _all(runs: tuple[range, ...]) -> slice:
    return slice(0, sum(map(len, runs)))


def _run(runs: tuple[range, ...], first: int, some: list[range]) -> slice:
    start = _starts(runs)[first]
    return slice(start, start + sum(map(len, some)))


def _at(positions: Positions, runs: tuple[range, ...], device: torch.device) -> Positions:
    """The positions of runs of columns; a range where they are one."""
    if isinstance(positions, range) and len(runs) == 1:
        return positions[runs[0].start : runs[0].stop]
    return chosen_runs(position_tensor(positions, device), runs)
