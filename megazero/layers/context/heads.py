"""Exchanges parts of a sequence for heads, and back (DeepSpeed-Ulysses, Jacobs et al. 2023).

Each of p ranks has s/p rows of all heads. After `exchange_heads` it has all s rows of its share of the heads,
in the order of the ranks; after `return_heads`, its rows of all heads again. One all-to-all carries queries,
keys and values together, so that a layer makes two of them forward and two backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import Function

from megazero.errors import ConfigError
from megazero.mpu.group import Group
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each rank computes attention for.

    Query heads are shared out evenly, the first ranks taking one more where they do not divide. Whole groups
    of query heads that share keys and values go to one rank if that gives no rank more heads. A key/value
    head that several ranks use goes to each of them.

    Attributes:
        heads, kv_heads: the numbers of query heads and of key/value heads that are exchanged.
        size, rank: the number of ranks, and this one.
        groups: the number of groups of heads that stay on one rank even if some ranks then have more heads;
            with fewer groups than ranks, groups are cut.

    Raises:
        ConfigError: there are fewer query heads than ranks, or they are no multiple of the key/value heads.
    """

    heads: int
    kv_heads: int
    size: int
    rank: int
    groups: int | None = None

    def __post_init__(self) -> None:
        for what, count in (("key/value heads", self.kv_heads), ("groups of heads", self.groups)):
            if count is not None and (count < 1 or self.heads % count):
                raise ConfigError(
                    f"`num_attention_heads` must be a multiple of the {what} ({count}), but is {self.heads}; "
                    "correct one of them"
                )
        if self.heads < self.size:
            raise ConfigError(
                f"`num_attention_heads` must be at least the number of ranks that exchange heads "
                f"({self.size}), but is {self.heads}; use fewer ranks, or a ring of them"
            )

    @cached_property
    def queries(self) -> tuple[range, ...]:
        """The query heads of each rank."""
        groups = self.groups or self.kv_heads
        together, largest = self.heads // groups, -(-self.heads // self.size)
        free = -(-groups // self.size) * together == largest
        step = together if groups >= self.size and (free or self.groups is not None) else 1
        return tuple(
            range(step * part.start, step * part.stop) for part in _even(self.heads // step, self.size)
        )

    @cached_property
    def keys(self) -> tuple[range, ...]:
        """The key/value heads that each rank's query heads use."""
        together = self.heads // self.kv_heads
        return tuple(range(part.start // together, (part.stop - 1) // together + 1) for part in self.queries)

    @cached_property
    def uses(self) -> tuple[int, ...]:
        """How many of this rank's query heads use each of its key/value heads."""
        together, own = self.heads // self.kv_heads, self.queries[self.rank]
        return tuple(
            min(own.stop, (key + 1) * together) - max(own.start, key * together)
            for key in self.keys[self.rank]
        )

    @property
    def repeated(self) -> bool:
        """Whether a key/value head goes to several ranks."""
        return sum(map(len, self.keys)) > self.kv_heads


def _even(count: int, parts: int) -> list[range]:
    size, larger = divmod(count, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def exchange_heads(
    q: Tensor, k: Tensor, v: Tensor, plan: HeadPlan, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """All rows of this rank's heads.

    The results are views of the received buffer. Each key/value head serves equally many consecutive query
    heads; if the plan cuts groups unevenly, keys and values are repeated for each query head. The backward
    pass sums the gradients of a key/value head over the ranks that use it.

    Args:
        q: [s/p, b, n, d].
        k, v: [s/p, b, g, d] and [s/p, b, g, e]. Every rank has equally many rows.
        plan: for n and g heads.
        group: the ranks that share the sequence.

    Returns:
        [s, b, n', d], [s, b, g', d] and [s, b, g', e] of the n' query heads ``plan.queries[plan.rank]``.
    """
    if group.size == 1:
        return q, k, v
    q, k, v = apply(_ExchangeHeads, q, k, v, plan, group)
    if len(set(plan.uses)) > 1:
        k, v = (_repeated(x, plan.uses) for x in (k, v))
    return q, k, v


def return_heads(x: Tensor, plan: HeadPlan, group: Group) -> Tensor:
    """This rank's rows of all heads: [s, b, n' e], results of this rank's query heads, -> [s/p, b, n e]."""
    return x if group.size == 1 else apply(_ReturnHeads, x, plan, group)


def _repeated(x: Tensor, counts: Sequence[int]) -> Tensor:
    """[s, b, g, d] -> [s, b, sum(counts), d]."""
    heads = zip(x.split(1, 2), counts, strict=True)
    return torch.cat([head.expand(-1, -1, count, -1) for head, count in heads], 2)


_Ctx = Context[tuple[HeadPlan, Group, tuple[int, int, int]]]


class _ExchangeHeads(Function):
    @staticmethod
    def forward(
        ctx: _Ctx, q: Tensor, k: Tensor, v: Tensor, plan: HeadPlan, group: Group
    ) -> tuple[Tensor, Tensor, Tensor]:
        widths = (q.shape[-1], k.shape[-1], v.shape[-1])
        ctx.kept = plan, group, widths
        shares = (plan.queries, plan.keys, plan.keys)
        parts = [
            [_columns(x, share[rank]) for x, share in zip((q, k, v), shares, strict=True)]
            for rank in range(plan.size)
        ]
        q, k, v = _split(_join_rows(parts, group), plan, widths, plan.rank)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, *grads: Tensor) -> Gradients:
        plan, group, widths = ctx.kept
        whole = torch.cat([grad.flatten(2) for grad in grads], 2)
        parts = _split_rows(whole, [_width(plan, widths, rank) for rank in range(plan.size)], group)
        split = [_split(part, plan, widths, rank) for rank, part in enumerate(parts)]
        q, k, v = zip(*split, strict=True)
        return torch.cat(q, 2), _summed(k, plan), _summed(v, plan), None, None


class _ReturnHeads(Function):
    @staticmethod
    def forward(ctx: Context[tuple[Group, list[int]]], x: Tensor, plan: HeadPlan, group: Group) -> Tensor:
        width = x.shape[-1] // len(plan.queries[plan.rank])
        ctx.kept = group, [width * len(heads) for heads in plan.queries]
        return torch.cat(_split_rows(x, ctx.kept[1], group), 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[tuple[Group, list[int]]], grad: Tensor) -> Gradients:
        group, widths = ctx.kept
        return _join_rows([[part] for part in grad.split(widths, 2)], group), None, None


def _columns(x: Tensor, heads: range) -> Tensor:
    """[s, b, n, d] -> [s, b, len(heads) * d]."""
    return x[:, :, heads.start : heads.stop].flatten(2)


def _width(plan: HeadPlan, widths: tuple[int, int, int], rank: int) -> int:
    """The elements of a row that go to a rank: its heads of queries, keys and values, of these widths."""
    q, k, v = widths
    return len(plan.queries[rank]) * q + len(plan.keys[rank]) * (k + v)


def _split(x: Tensor, plan: HeadPlan, widths: tuple[int, int, int], rank: int) -> list[Tensor]:
    """A rank's queries, keys and values, [s, b, heads, width] each, that lie beside each other in x."""
    counts = (len(plan.queries[rank]), len(plan.keys[rank]), len(plan.keys[rank]))
    pieces = x.split([count * width for count, width in zip(counts, widths, strict=True)], 2)
    return [piece.unflatten(2, (count, -1)) for piece, count in zip(pieces, counts, strict=True)]


def _summed(parts: Sequence[Tensor], plan: HeadPlan) -> Tensor:
    """[s/p, b, g, d], from the heads that each rank uses; sums are made in float32 at least."""
    if not plan.repeated:
        return torch.cat(list(parts), 2)
    first = parts[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    total = first.new_zeros(*first.shape[:2], plan.kv_heads, first.shape[-1], dtype=dtype)
    for part, heads in zip(parts, plan.keys, strict=True):
        total[:, :, heads.start : heads.stop] += part
    return total.to(first.dtype)


def _join_rows(parts: Sequence[Sequence[Tensor]], group: Group) -> Tensor:
    """Tensors [s/p, b, w] for each rank, laid beside each other, -> [s, b, w] for this one from all ranks."""
    rows, batch = parts[0][0].shape[:2]
    widths = [sum(x.shape[2] for x in beside) for beside in parts]
    sizes = [rows * batch * width for width in widths]
    sent = parts[0][0].new_empty(sum(sizes))
    for place, beside in zip(sent.split(sizes), parts, strict=True):
        torch.cat(list(beside), 2, out=place.view(rows, batch, -1))
    received = sent.new_empty(group.size * rows, batch, widths[group.rank])
    group.all_to_all(received.view(-1), sent, [sizes[group.rank]] * group.size, sizes).wait()
    return received


def _split_rows(x: Tensor, widths: Sequence[int], group: Group) -> list[Tensor]:
    """The transpose of `_join_rows`: [s, b, w] with this rank's w -> [s/p, b, w] for the w of each rank."""
    rows, batch = x.shape[0] // group.size, x.shape[1]
    sizes = [rows * batch * width for width in widths]
    received = x.new_empty(sum(sizes))
    group.all_to_all(received, x.reshape(-1), sizes, [sizes[group.rank]] * group.size).wait()
    return [part.view(rows, batch, -1) for part in received.split(sizes)]
