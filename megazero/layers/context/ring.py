"""Attention whose keys and values come from other ranks, one after the other (ring attention).

(Liu et al. 2023.) At step i a rank uses the keys of the rank i before it, which that rank has sent to it
directly. On a switched network this costs no more than passing them on around a ring, no rank gets keys that
its queries do not see, and gradients of keys return in one hop. The next keys arrive while a step computes.
Results are merged by their log-sum-exp in fp32 (Milakov & Gimelshein 2018). Backward is given the merged
result and log-sum-exp, so that each block's share of the gradients is exact (Dao et al. 2022), and fetches
keys and values again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function

from megazero.layers.context.masks import Pair, PairMasks
from megazero.layers.rows import columns_of
from megazero.mpu.group import Group, Transfer, Work
from megazero.ops.attention import backward_of_part, forward_of_part, merge_part
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import compute_dtype

_KEYS, _VALUES, _GRAD_KEYS, _GRAD_VALUES = range(4)


@dataclass(frozen=True, eq=False)
class Ring:
    """The ranks that exchange keys and values, and the columns of the sequences that each has.

    Attributes:
        group: the ranks.
        length: the length of whole sequences.
        zigzag: whether a rank's columns are two runs.
        masks: which queries attend to which keys.
    """

    group: Group
    length: int
    zigzag: bool
    masks: PairMasks

    def columns(self, rank: int) -> tuple[range, ...]:
        """The runs of columns of a rank."""
        return columns_of(rank % self.group.size, self.group.size, self.length, zigzag=self.zigzag)

    @property
    def own(self) -> tuple[range, ...]:
        """The runs of this rank."""
        return self.columns(self.group.rank)

    def sent(self, owner: int, reader: int) -> list[slice]:
        """The owner's rows that the reader's queries attend to."""
        theirs, start, rows = self.columns(owner), 0, []
        needed = self.masks.needed(self.columns(reader), theirs)
        for run in theirs:
            offset = start - run.start
            rows += [slice(part.start + offset, part.stop + offset) for part in needed if part.start in run]
            start += len(run)
        return rows

    def pairs(self, step: int) -> list[Pair]:
        """The calls with the keys that this rank receives for a step."""
        theirs = self.columns(self.group.rank - step)
        return self.masks.pairs(self.own, self.masks.needed(self.own, theirs) if step else theirs)

    def own_pairs(self) -> tuple[list[Pair], list[Pair]]:
        """The calls with this rank's own keys, in two parts of about the same work."""
        pairs = self.masks.pairs(self.own, self.own, fused=False)
        return pairs[::2], pairs[1::2]


class _Exchange:
    """The messages of one pass: what this rank sends to and gets from the ranks at a distance of `step`."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor):
        self.ring, self.k, self.v = ring, k, v
        self.rank, self.size = ring.group.rank, ring.group.size
        self._sending: list[tuple[Work, Tensor]] = []

    def fetch(self, step: int) -> _Arriving:
        """Start to send keys and values to the reader of a step, and to receive the ones for this rank."""
        reader, owner = self._others(step)
        count, rows = _rows(self.ring.sent(owner, self.rank)), self.ring.sent(self.rank, reader)
        there = [x.new_empty(count, *x.shape[1:]) for x in (self.k, self.v)]
        parts = [_packed(x, rows) for x in (self.k, self.v)] if rows else []
        return self._swap(parts, reader, there, owner, (_KEYS, _VALUES))

    def return_gradients(self, step: int, grads: Sequence[Tensor]) -> _Arriving:
        """Start to return a step's gradients to the keys' owner, and to receive those of this rank's keys."""
        reader, owner = self._others(step)
        count = _rows(self.ring.sent(self.rank, reader))
        there = [
            torch.empty(count, *x.shape[1:], dtype=compute_dtype(x.dtype), device=x.device)
            for x in (self.k, self.v)
        ]
        parts = grads if len(grads[0]) else []
        return self._swap(parts, owner, there, reader, (_GRAD_KEYS, _GRAD_VALUES))

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _others(self, step: int) -> tuple[int, int]:
        """The rank that reads this one's keys at a step, and the one whose keys this one reads."""
        return (self.rank + step) % self.size, (self.rank - step) % self.size

    def _swap(
        self, sent: Sequence[Tensor], to: int, there: Sequence[Tensor], source: int, tags: tuple[int, int]
    ) -> _Arriving:
        """Start to send two tensors, or none, and to receive into `there`, except where they are empty."""
        got = there if len(there[0]) else []
        transfers = [Transfer("recv", x, source, tag) for x, tag in zip(got, tags, strict=False)]
        transfers += [Transfer("send", x, to, tag) for x, tag in zip(sent, tags, strict=False)]
        works = self.ring.group.exchange(transfers) if transfers else []
        self._sending += zip(works[len(got) :], sent, strict=True)
        return _Arriving(works[: len(got)], there[0], there[1])


@dataclass(frozen=True)
class _Arriving:
    """Two tensors on their way here: keys and values, or their gradients."""

    works: list[Work]
    first: Tensor
    second: Tensor

    def arrived(self) -> tuple[Tensor, Tensor]:
        """Both, when they are here."""
        for work in self.works:
            work.wait()
        return self.first, self.second


def _rows(slices: Iterable[slice]) -> int:
    return sum(rows.stop - rows.start for rows in slices)


def _packed(x: Tensor, rows: Sequence[slice]) -> Tensor:
    """The rows of x, contiguous."""
    parts = [x[part] for part in rows]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


class _RingAttention(Function):
    """The result [s, b, n, e] in the dtype of q, and the log-sum-exp [b, n, s] in fp32."""

    @staticmethod
    def forward(ctx: Context[Ring], q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
        k, v = k.contiguous(), v.contiguous()
        exchange, (s, b, n, _) = _Exchange(ring, k, v), q.shape
        wide = compute_dtype(q.dtype)
        out = torch.zeros(s, b, n, v.shape[-1], dtype=wide, device=q.device)
        lse = torch.full((b, n, s), -torch.inf, dtype=wide, device=q.device)
        coming = exchange.fetch(1)
        for step in range(ring.group.size):
            keys, values = (k, v) if step == 0 else coming.arrived()
            if 0 < step < ring.group.size - 1:
                coming = exchange.fetch(step + 1)
            for pair in ring.pairs(step):
                rows = pair.queries
                ring.masks.see(q[rows], keys[pair.keys], pair.call)
                part, part_lse = forward_of_part(q[rows], keys[pair.keys], values[pair.keys], pair.call)
                merge_part(out[rows], lse[..., rows], part, part_lse)
        exchange.finish()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kept = ring
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Ring], grad: Tensor | None, grad_lse: Tensor | None) -> Gradients:
        q, k, v, out, lse = ctx.saved_tensors
        ring, size = ctx.kept, ctx.kept.group.size
        exchange, wide = _Exchange(ring, k, v), compute_dtype(q.dtype)
        grad = torch.zeros_like(out) if grad is None else grad.contiguous()
        grads = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]

        def add(pairs: Sequence[Pair], keys: Tensor, values: Tensor, theirs: Sequence[Tensor]) -> None:
            for pair in pairs:
                rows, there = pair.queries, pair.keys
                of_lse = None if grad_lse is None else grad_lse[..., rows]
                tensors = (q[rows], keys[there], values[there], out[rows], lse[..., rows], grad[rows])
                totals = (grads[0][rows], theirs[0][there], theirs[1][there])
                for total, part in zip(totals, backward_of_part(*tensors, pair.call, of_lse), strict=True):
                    total += part

        # Own keys take turns around those of others: the first ones while those travel, the last ones while
        # their gradients do.
        first, last = ring.own_pairs()
        coming, returning = exchange.fetch(1), None
        add(first, k, v, grads[1:])
        for step in range(1, size):
            keys, values = coming.arrived()
            if step < size - 1:
                coming = exchange.fetch(step + 1)
            theirs = [torch.zeros_like(x, dtype=wide) for x in (keys, values)]
            add(ring.pairs(step), keys, values, theirs)
            if returning is not None:
                _add_home(ring, step - 1, returning, grads)
            returning = exchange.return_gradients(step, theirs)
        add(last, k, v, grads[1:])
        assert returning is not None, "a ring has others"
        _add_home(ring, size - 1, returning, grads)
        exchange.finish()
        return *(total.to(x.dtype) for total, x in zip(grads, (q, k, v), strict=True)), None


def _add_home(ring: Ring, step: int, arriving: _Arriving, grads: Sequence[Tensor]) -> None:
    """Add the gradients that the reader at a distance of `step` computed for this rank's keys and values."""
    reader, start = ring.group.rank + step, 0
    parts = arriving.arrived()
    for rows in ring.sent(ring.group.rank, reader % ring.group.size):
        stop = start + rows.stop - rows.start
        for total, part in zip(grads[1:], parts, strict=True):
            total[rows] += part[start:stop]
        start = stop


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over all keys of their sequences.

    Args:
        q: [s, b, n, d], the rows of this rank's columns, one run after the other.
        k, v: [s, b, g, d] and [s, b, g, e], of the same rows.
        ring: the ranks that have the other columns, and the masks.

    Returns:
        The result [s, b, n, e], and the log-sum-exp [b, n, s] in fp32.
    """
    return apply(_RingAttention, q, k, v, ring)
