"""Attention cores of layers whose sequences lie on several ranks (context parallelism)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megazero.layers.collectives import gather_for_parts
from megazero.layers.context.heads import HeadPlan, exchange_heads, return_heads
from megazero.layers.context.masks import PairMasks
from megazero.layers.context.ring import Ring, ring_attention
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.layers.rows import chosen_runs
from megazero.mpu.group import Group
from megazero.ops.attention import BlockLayout, Documents, Part, attention
from megazero.ops.dropout import AttentionDropout
from megazero.ops.positions import Positions


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
        self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs, attends: Attends, bias: Tensor | None
    ) -> Tensor:
        plan = HeadPlan(q.shape[2], k.shape[2], self.inner.size, self.inner.rank)
        own = plan.queries[plan.rank]
        first = self.heads.rank * q.shape[2] + own.start
        turned = self.zigzag and self.inner.size > 1
        q, k, v = exchange_heads(q, k, v, plan, self.inner)
        if turned:
            q, k, v = (in_order(x, self.inner.size) for x in (q, k, v))
        out = self._attend(q, k, v, inputs, of_heads(attends, own), first)
        if turned:
            out = out_of_order(out, self.inner.size)
        return return_heads(out, plan, self.inner)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs, attends: Attends, first: int
    ) -> Tensor:
        """[s, b, n e] of the heads from `first` on, for the rows of this rank's block."""
        rows, dropout = inputs.rows, dropout_of(inputs, attends, first)
        if self.outer.size == 1:
            return attention(
                q,
                k,
                v,
                causal=attends.causal,
                document_ids=rows.documents,
                dropout=dropout,
                pattern=attends.pattern,
            )
        masks = PairMasks(attends, 1 / math.sqrt(q.shape[-1]), None, rows.documents, dropout)
        out, _ = ring_attention(q, k, v, Ring(self.outer, rows.whole_length, self.zigzag, masks))
        return out.flatten(2)


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
        self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs, attends: Attends, bias: Tensor | None
    ) -> Tensor:
        rows, size = inputs.rows, self.sharers.size
        dropout = dropout_of(inputs, attends, self.heads.rank * q.shape[2])
        k, v = (gather_for_parts(x.contiguous(), self.sharers) for x in (k, v))
        if self.zigzag:
            k, v = (in_order(x, size) for x in (k, v))
        runs, outs = rows.spread.columns(rows.whole_length), []
        for queries, own in zip(q.split([len(run) for run in runs]), runs, strict=True):
            keys = _seen(own, attends, rows.whole_length)
            ids = rows.documents
            outs.append(
                attention(
                    queries,
                    k[keys.start : keys.stop],
                    v[keys.start : keys.stop],
                    causal=attends.causal,
                    document_ids=None if ids is None else Documents(ids.ids[:, keys.start : keys.stop]),
                    dropout=None if dropout is None else _part_of(dropout, own, keys),
                    pattern=attends.pattern,
                    part=_place(own, keys, attends, ids),
                )
            )
        return torch.cat(outs)


def dropout_of(inputs: LayerInputs, attends: Attends, first: int) -> AttentionDropout | None:
    """The dropout of the probabilities of the heads from `first` on, over all rows."""
    rows = inputs.rows
    if rows.keys is None or attends.dropout == 0.0:
        return None
    keys = inputs.keys_of(attends.layer, "attention")
    return AttentionDropout(attends.dropout, keys, rows.positions, rows.positions, first)


def of_heads(attends: Attends, heads: range) -> Attends:
    """The settings of some of the heads here."""
    layout = attends.pattern.layout
    if layout is None or len(layout.blocks) == 1:
        return attends
    own = BlockLayout(layout.blocks[heads.start : heads.stop], layout.size)
    return replace(attends, pattern=replace(attends.pattern, layout=own))


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
    free = pattern.idle and not attends.causal and documents is None
    if not absolute and (own.stop == keys.stop or free):
        return None
    ids = None if documents is None else documents.ids[:, own.start : own.stop]
    return Part(own.start, keys.start, ids)


def _part_of(dropout: AttentionDropout, queries: range, keys: range) -> AttentionDropout:
    def at(positions: Positions, run: range) -> Positions:
        return positions[run.start : run.stop]

    return replace(
        dropout,
        keys=dropout.keys if dropout.keys.dim() == 1 else chosen_runs(dropout.keys, (queries,)),
        query_positions=at(dropout.query_positions, queries),
        key_positions=at(dropout.key_positions, keys),
    )
