"""Collectives that autograd sees: each pairs a forward communication with its transpose.

The sequence dim is dim 0 of `[s, b, h]`. The conjugate pairs are those of Megatron-LM (Shoeybi et al. 2019)
and of sequence parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from megazero.mpu.group import Group
from megazero.ops.autograd import Context, Gradients, apply

_Ctx = Context[tuple[Group, list[int], list[int]]]


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """[n, ...] from each member -> [size * n, ...] on every member."""
    output = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    group.all_gather(output, x.contiguous()).wait()
    return output


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """[size * n, ...] partial sums on each member -> this member's [n, ...] of the total."""
    output = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    group.reduce_scatter(output, x.contiguous()).wait()
    return output


def own_rows(x: Tensor, group: Group) -> Tensor:
    """This member's block of the rows of `x`."""
    rows = x.shape[0] // group.size
    return x.narrow(0, group.rank * rows, rows)


def _all_to_all_rows(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    group.all_to_all(output, x.contiguous(), received, sent).wait()
    return output


def _own(x: Tensor, *, given_away: bool) -> Tensor:
    """A contiguous copy of x that may be overwritten, or x itself if it was given away."""
    whole = x.contiguous()
    return x.clone() if whole is x and not given_away else whole


class _ReduceFromSlices(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group, given_away: bool) -> Tensor:
        # Of a view autograd would rewrite the history, which costs more than the copy.
        total = _own(x, given_away=given_away and not x._is_view())
        if total is x:
            # From here on autograd refuses a backward for which somebody saved the old values.
            ctx.mark_dirty(x)
        group.all_reduce(total).wait()
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Gradients:
        return grad, None, None


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx: Context[Group], x: Tensor, group: Group) -> Tensor:
        ctx.kept = group
        return reduce_scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Context[Group], grad: Tensor) -> Gradients:
        return gather_rows(grad, ctx.kept), None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Context[Group], x: Tensor, group: Group) -> Tensor:
        ctx.kept = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx: Context[Group], grad: Tensor) -> Gradients:
        return own_rows(grad, ctx.kept).contiguous(), None


class _GatherForParts(Function):
    @staticmethod
    def forward(ctx: Context[Group], x: Tensor, group: Group) -> Tensor:
        ctx.kept = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx: Context[Group], grad: Tensor) -> Gradients:
        return reduce_scatter_rows(grad, ctx.kept), None


class _ShareForParts(Function):
    @staticmethod
    def forward(ctx: Context[tuple[Group, bool]], x: Tensor, group: Group, given_away: bool) -> Tensor:
        ctx.kept = group, given_away
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context[tuple[Group, bool]], grad: Tensor) -> Gradients:
        group, given_away = ctx.kept
        total = _own(grad, given_away=given_away)
        group.all_reduce(total).wait()
        return total, None, None


class _SplitRows(Function):
    @staticmethod
    def forward(ctx: Context[Group], x: Tensor, group: Group) -> Tensor:
        ctx.kept = group
        return own_rows(x, group).clone()

    @staticmethod
    def backward(ctx: Context[Group], grad: Tensor) -> Gradients:
        return gather_rows(grad, ctx.kept), None


class _ExchangeRows(Function):
    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
        ctx.kept = group, sent, received
        return _all_to_all_rows(x, group, sent, received)

    @staticmethod
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        group, sent, received = ctx.kept
        return _all_to_all_rows(grad, group, received, sent), None, None, None


class _GatherFeatures(Function):
    @staticmethod
    def forward(ctx: Context[tuple[Group, int]], x: Tensor, group: Group) -> Tensor:
        ctx.kept = group, x.shape[-1]
        slices = gather_rows(x.unsqueeze(0), group)
        return torch.cat(list(slices), dim=-1)

    @staticmethod
    def backward(ctx: Context[tuple[Group, int]], grad: Tensor) -> Gradients:
        group, width = ctx.kept
        return grad.narrow(-1, group.rank * width, width).contiguous(), None


def reduce_from_slices(x: Tensor, group: Group, *, given_away: bool = False) -> Tensor:
    """Sum the members' partial results; backward is the identity.

    Args:
        x: the partial result.
        group: the members.
        given_away: whether the sum may overwrite x, because nobody else reads x and the operator that made it
            has not saved it (otherwise autograd raises RuntimeError in backward).
    """
    return x if group.size == 1 else apply(_ReduceFromSlices, x, group, given_away)


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Partial [s, b, h] -> total [s/tp, b, h]; backward gathers."""
    return x if group.size == 1 else apply(_ReduceScatterSequence, x, group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """[s/tp, b, h] -> [s, b, h] for computations that every member repeats in full.

    Each member's gradient is then the whole gradient already, so backward takes the member's own rows.
    """
    return x if group.size == 1 else apply(_GatherSequence, x, group)


def gather_for_parts(x: Tensor, group: Group) -> Tensor:
    """[n, ...] -> [size * n, ...] for a computation of which each member does a part.

    Backward sums the members' gradients and takes the member's own rows.
    """
    return x if group.size == 1 else apply(_GatherForParts, x, group)


def share_for_parts(x: Tensor, group: Group, *, given_away: bool = False) -> Tensor:
    """Hand x, equal on all members, to a computation of which each does a part; backward sums their
    gradients.

    Args:
        x: whole on each member.
        group: the members.
        given_away: whether backward may overwrite the gradient that it gets, because a single operator reads
            the result and gives it a gradient of its own. (An add, by contrast, hands one gradient to both
            inputs.)
    """
    return x if group.size == 1 else apply(_ShareForParts, x, group, given_away)


def split_rows(x: Tensor, group: Group) -> Tensor:
    """[size * n, ...], the same on all members -> this member's [n, ...]; backward gathers."""
    return x if group.size == 1 else apply(_SplitRows, x, group)


def exchange_rows(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    """Blocks of `sent` rows of x, one for each member in turn -> the blocks of `received` rows from them.

    Backward sends them back.
    """
    return x if group.size == 1 else apply(_ExchangeRows, x, group, sent, received)


def gather_features(x: Tensor, group: Group) -> Tensor:
    """[..., n/tp] -> [..., n]; backward takes this member's slice."""
    return x if group.size == 1 else apply(_GatherFeatures, x, group)
