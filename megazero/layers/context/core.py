"""Attention cores of layers whose sequences lie on several ranks (context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.layers.collectives import gather_for_parts
from megazero.layers.context.heads import HeadPlan, exchange_heads, return_heads
from megazero.layers.context.masks import PairMasks
from megazero.layers.context.ring import Ring, ring_attention
from megazero.layers.inputs import Attends, AttentionCore, LayerInputs
from megazero.mpu.group import Group
from megazero.ops.attention import Bias, attend, with_softmax_offset

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
        bias: Bias | None,
        offset: Tensor | None = None,
    ) -> Tensor:
        plan = HeadPlan(q.shape[2], k.shape[2], self.inner.size, self.inner.rank)
        own = plan.queries[plan.rank]
        masks = masks_of(q, inputs, attends, bias, self.heads).of_heads(own)
        offset = None if offset is None else offset[own.start : own.stop]
        turned = self.zigzag and self.inner.size > 1
        q, k, v = exchange_heads(q, k, v, plan, self.inner)
        if turned:
            q, k, v = (in_order(x, self.inner.size) for x in (q, k, v))
        if self.outer.size == 1:
            whole = range(inputs.rows.whole_length)
            call = masks.call(whole, whole)
            masks.see(q, k, call)
            out = attend(q, k, v, call, offset)
        else:
            out = self._around(q, k, v, inputs.rows.whole_length, masks, offset)
        if turned:
            out = out_of_order(out, self.inner.size)
        return return_heads(out, plan, self.inner)

    def _around(
        self, q: Tensor, k: Tensor, v: Tensor, length: int, masks: PairMasks, offset: Tensor | None
    ) -> Tensor:
        """The ring's result [s, b, n e], computed for a few heads at a time where there are many rows.

        Results and gradients are summed in fp32, so with a long sequence memory, not communication, is the
        limit; a few heads at a time bound it (untied heads: Ghadia et al. 2026, arXiv:2602.21196).
        """
        turns = _turns(q, k.shape[2])
        heads, groups, outs, lses = q.shape[2] // turns, k.shape[2] // turns, [], []
        parts = zip(q.split(heads, 2), k.split(groups, 2), v.split(groups, 2), strict=True)
        for turn, some in enumerate(parts):
            own = masks.of_heads(range(turn * heads, (turn + 1) * heads))
            out, lse = ring_attention(*some, Ring(self.outer, length, self.zigzag, own))
            outs.append(out.flatten(2))
            lses.append(lse)
        out, lse = (outs[0], lses[0]) if turns == 1 else (torch.cat(outs, 2), torch.cat(lses, 1))
        return out if offset is None else with_softmax_offset(out, lse, offset)


@dataclass(frozen=True)
class GatheringCore(AttentionCore):
    """Gathers all keys and values; a rank's queries then attend to those before them (Llama 3, 2024).

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
        bias: Bias | None,
        offset: Tensor | None = None,
    ) -> Tensor:
        masks, rows = masks_of(q, inputs, attends, bias, self.heads), inputs.rows
        k, v = (gather_for_parts(x.contiguous(), self.sharers) for x in (k, v))
        if self.zigzag:
            k, v = (in_order(x, self.sharers.size) for x in (k, v))
        runs, outs = rows.spread.columns(rows.whole_length), []
        for queries, own in zip(q.split([len(run) for run in runs]), runs, strict=True):
            keys = masks.seen(own, range(rows.whole_length)) or own[:1]
            seen = slice(keys.start, keys.stop)
            call = masks.call(own, keys)
            masks.see(queries, k[seen], call)
            outs.append(attend(queries, k[seen], v[seen], call, offset))
        return torch.cat(outs)


def masks_of(q: Tensor, inputs: LayerInputs, attends: Attends, bias: Bias | None, heads: Group) -> PairMasks:
    """The masks of a layer for the heads of q [s, b, n, d], one slice of `heads`."""
    assert bias is None or not isinstance(bias, Tensor), "a bias of all pairs is on no rank whole"
    dropout = inputs.attention_dropout(attends, heads.rank * q.shape[2])
    documents = inputs.rows.documents
    return PairMasks(attends, attends.scale_of(q), bias, documents, dropout, attends.watching)


def _turns(q: Tensor, groups: int) -> int:
    """The number of passes over the heads: fp32 results of one take at most `MOST_AT_ONCE` bytes."""
    size = 4 * q.numel()
    fits = (n for n in range(1, groups + 1) if groups % n == 0 and size <= n * MOST_AT_ONCE)
    return next(fits, groups)


def in_order(x: Tensor, ranks: int) -> Tensor:
    """Rows of all ranks, each with a run from either end, put in the order of their columns."""
    pieces = x.unflatten(0, (ranks, 2, -1))
    return torch.cat([pieces[:, 0], pieces[:, 1].flip(0)]).flatten(0, 1)


def out_of_order(x: Tensor, ranks: int) -> Tensor:
    """The inverse of `in_order`."""
    first, second = (half.unflatten(0, (ranks, -1)) for half in x.chunk(2))
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)
