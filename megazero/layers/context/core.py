"""Attention cores of layers whose sequences lie on several ranks (context parallelism)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megazero.layers.collectives import gather_for_parts
from megazero.layers.context.heads import HeadPlan, exchange_heads, return_heads
from megazero.layers.context.masks import PairMasks, of_heads, slopes_of_heads
from megazero.layers.context.ring import Ring, ring_attention
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.rows import Rows, chosen_runs
from megazero.mpu.group import Group
from megazero.ops.attention import (
    ALL,
    Documents,
    Part,
    Slopes,
    attention,
    attention_with_lse,
    with_softmax_offset,
)
from megazero.ops.dropout import AttentionDropout
from megazero.ops.positions import Positions

MOST_AT_ONCE = 1 << 30
"""Bytes of fp32 results that a ring keeps at a time, if it may do with fewer heads."""


@dataclass(frozen=True)
class ExchangingCore(AttentionCore):
    """Exchanges heads for rows within a block of ranks, and keys and values between the blocks.

    With blocks of one rank it is a ring (Liu et al. 2023), with one block DeepSpeed-Ulysses (Jacobs et al.
    2023), in between USP (Fang & Zhao 2024).

    Attributes:
        heads: the ranks that the heads are sliced over.
        inner: this rank's block, adjacent ranks.
        outer: the ranks at this one's place in the blocks.
        zigzag: whether a rank's columns are two runs.
    """

    heads: Group
    inner: Group
    outer: Group
    zigzag: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: LayerInputs,
        attends: Attends,
        bias: Tensor | Slopes | None,
        offset: Tensor | None = None,
    ) -> Tensor:
        plan = HeadPlan(q.shape[2], k.shape[2], self.inner.size, self.inner.rank)
        own = plan.queries[plan.rank]
        first = self.heads.rank * q.shape[2] + own.start
        turned = self.zigzag and self.inner.size > 1
        q, k, v = exchange_heads(q, k, v, plan, self.inner)
        if turned:
            q, k, v = (in_order(x, self.inner.size) for x in (q, k, v))
        some = of_heads(attends, own), slopes_of_heads(bias, own), dropout_of(inputs, attends, first)
        out, lse = self._attend(q, k, v, inputs.rows, *some, wants_lse=offset is not None)
        if offset is not None:
            assert lse is not None, "it was wanted"
            out = with_softmax_offset(out, lse, offset[own.start : own.stop])
        if turned:
            out = out_of_order(out, self.inner.size)
        return return_heads(out, plan, self.inner)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        attends: Attends,
        slopes: Slopes | None,
        dropout: AttentionDropout | None,
        *,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, n e] of this block's rows, and their log-sum-exp if it is wanted or there anyway."""
        if self.outer.size > 1:
            masks = PairMasks(attends, 1 / math.sqrt(q.shape[-1]), slopes, rows.documents, dropout)
            return self._around(q, k, v, rows.whole_length, masks)
        settings: dict[str, Any] = {
            "causal": attends.causal,
            "document_ids": rows.documents,
            "bias": slopes,
            "dropout": dropout,
            "pattern": attends.pattern,
        }
        if wants_lse:
            return attention_with_lse(q, k, v, **settings)
        return attention(q, k, v, **settings), None

    def _around(
        self, q: Tensor, k: Tensor, v: Tensor, length: int, masks: PairMasks
    ) -> tuple[Tensor, Tensor]:
        """The ring's result [s, b, n e] and log-sum-exp, a few heads at a time where rows are many.

        Results and gradients are summed in fp32, and keys of others come by as they are, so a long sequence
        has to wait for memory rather than for links (untied heads: Ghadia et al. 2026, arXiv:2602.21196).
        """
        turns = _turns(q, k.shape[2])
        heads, groups, outs, lses = q.shape[2] // turns, k.shape[2] // turns, [], []
        parts = zip(q.split(heads, 2), k.split(groups, 2), v.split(groups, 2), strict=True)
        for turn, some in enumerate(parts):
            own = masks.of_heads(range(turn * heads, (turn + 1) * heads))
            out, lse = ring_attention(*some, Ring(self.outer, length, self.zigzag, own))
            outs.append(out.flatten(2))
            lses.append(lse)
        return (outs[0], lses[0]) if turns == 1 else (torch.cat(outs, 2), torch.cat(lses, 1))


@dataclass(frozen=True)
class GatheringCore(AttentionCore):
    """Gathers all keys and values, of which a rank's queries see what their places let them (Llama 3, 2024).

    Attributes:
        heads: the ranks that the heads are sliced over.
        sharers: the ranks that share sequences.
        zigzag: whether a rank's columns are two runs.
    """

    heads: Group
    sharers: Group
    zigzag: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: LayerInputs,
        attends: Attends,
        bias: Tensor | Slopes | None,
        offset: Tensor | None = None,
    ) -> Tensor:
        rows, size = inputs.rows, self.sharers.size
        dropout = dropout_of(inputs, attends, self.heads.rank * q.shape[2])
        slopes = slopes_of_heads(bias, range(q.shape[2]))
        k, v = (gather_for_parts(x.contiguous(), self.sharers) for x in (k, v))
        if self.zigzag:
            k, v = (in_order(x, size) for x in (k, v))
        runs, outs, ids = rows.spread.columns(rows.whole_length), [], rows.documents
        for queries, own in zip(q.split([len(run) for run in runs]), runs, strict=True):
            keys = _seen(own, attends, rows.whole_length)
            seen = slice(keys.start, keys.stop)
            settings: dict[str, Any] = {
                "causal": attends.causal,
                "document_ids": None if ids is None else Documents(ids.ids[:, seen]),
                "bias": slopes,
                "dropout": None if dropout is None else _part_of(dropout, own, keys),
                "pattern": attends.pattern,
                "part": _place(own, keys, attends, ids),
            }
            if offset is None:
                outs.append(attention(queries, k[seen], v[seen], **settings))
            else:
                result = attention_with_lse(queries, k[seen], v[seen], **settings)
                outs.append(with_softmax_offset(*result, offset))
        return torch.cat(outs)


def dropout_of(inputs: LayerInputs, attends: Attends, first: int) -> AttentionDropout | None:
    """The dropout of the probabilities of the heads from `first` on, over all rows."""
    rows = inputs.rows
    if rows.keys is None or attends.dropout == 0.0:
        return None
    keys = inputs.keys_of(attends.layer, "attention")
    return AttentionDropout(attends.dropout, keys, rows.positions, rows.positions, first)


def _turns(q: Tensor, groups: int) -> int:
    """In how many turns the heads go around: the fp32 results of one take `MOST_AT_ONCE` at most."""
    size = 4 * q.numel()
    fits = (n for n in range(1, groups + 1) if groups % n == 0 and size <= n * MOST_AT_ONCE)
    return next(fits, groups)


def in_order(x: Tensor, ranks: int) -> Tensor:
    """The rows of adjacent ranks, each with one run from either end, in the order of their columns."""
    pieces = x.unflatten(0, (ranks, 2, -1))
    return torch.cat([pieces[:, 0], pieces[:, 1].flip(0)]).flatten(0, 1)


def out_of_order(x: Tensor, ranks: int) -> Tensor:
    """The inverse of `in_order`."""
    first, second = (half.unflatten(0, (ranks, -1)) for half in x.chunk(2))
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)


def _seen(own: range, attends: Attends, length: int) -> range:
    """The columns from the first to the last that any query of a run may attend to."""
    pattern = attends.pattern
    left, right = pattern.sides(attends.causal)
    start = 0 if left < 0 or pattern.sinks else max(0, own.start - left)
    stop = length if right < 0 else min(length, own.stop + right)
    return range(start, max(stop, pattern.prefix if own.start < pattern.prefix else 0))


def _place(own: range, keys: range, attends: Attends, documents: Documents | None) -> Part | None:
    """The place of a call; None if the last query has the last key, or places do not matter."""
    pattern = attends.pattern
    absolute = pattern.sinks or pattern.prefix or pattern.layout is not None
    free = pattern == ALL and not attends.causal and documents is None
    if not absolute and (own.stop == keys.stop or free):
        return None
    if documents is None:
        return Part(own.start, keys.start)
    begins = documents.bounds[0][:, keys.start : keys.stop] if pattern.sinks else None
    return Part(own.start, keys.start, documents.ids[:, own.start : own.stop], begins)


def _part_of(dropout: AttentionDropout, queries: range, keys: range) -> AttentionDropout:
    def at(positions: Positions, run: range) -> Positions:
        return positions[run.start : run.stop]

    return replace(
        dropout,
        keys=dropout.keys if dropout.keys.dim() == 1 else chosen_runs(dropout.keys, (queries,)),
        query_positions=at(dropout.query_positions, queries),
        key_positions=at(dropout.key_positions, keys),
    )
