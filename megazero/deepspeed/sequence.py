"""Ulysses (arXiv:2309.14509): attention over a sequence that ranks share, which exchange pieces for heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.comm.collectives import all_to_all_single
from megazero.deepspeed.comm.world import AnyGroup, get_rank, get_world_size
from megazero.errors import ConfigError

_HEADS = 2


class DistributedAttention(nn.Module):
    """Runs an attention of whole sequences on ranks that hold a piece of each.

    Before it, each rank gets the whole sequence for its share of the heads; after it, all heads for its piece
    of the sequence. Heads need not divide by the ranks: the first ranks take one group more.

    Args:
        local_attention: called with query, key and value of whole sequences; its result has their shape.
        sequence_process_group: the ranks that share a sequence, each with an equal piece.
        scatter_idx: the dim of the heads, 2.
        gather_idx: the dim of the sequence; `forward`'s `batch_dim_idx` decides.
        sp_stream: has no effect; the exchanges run one after the other.
        num_kv_heads: the heads of keys and values, by which heads are shared out; by default the key's.

    Raises:
        ConfigError: the heads are in another dim.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: AnyGroup,
        scatter_idx: int = _HEADS,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ):
        super().__init__()
        if scatter_idx != _HEADS:
            raise ConfigError(
                f"`scatter_idx` must be 2, the dim of the heads, but is {scatter_idx}; leave it out"
            )
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.num_kv_heads = num_kv_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 1,
        rotary_pos_emb: Sequence[Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The attention of this rank's piece.

        Args:
            query, key, value: ``[s/p, b, heads, d]``, or ``[b, s/p, heads, d]`` with `batch_dim_idx` 0.
            batch_dim_idx: the dim of the batch.
            rotary_pos_emb: cosines and sines ``[b, s, 1, d]`` of whole sequences, or None.
            args, kwargs: go to the local attention.

        Raises:
            ConfigError: there are fewer groups of heads than ranks, or `batch_dim_idx` is neither 0 nor 1.
        """
        if batch_dim_idx not in (0, 1):
            raise ConfigError(
                f"`batch_dim_idx` must be 0 or 1, but is {batch_dim_idx}; transpose the tensors"
            )
        dim, ranks = 1 - batch_dim_idx, get_world_size(self.spg)
        groups = self.num_kv_heads or key.shape[_HEADS]
        pieces = [query.shape[dim]] * ranks
        whole = [_to_heads(x, dim, pieces, groups, self.spg) for x in (query, key, value)]
        if rotary_pos_emb is not None:
            cosines, sines = (table.transpose(0, 1) if dim == 0 else table for table in rotary_pos_emb)
            whole[:2] = [rotated(x, cosines, sines) for x in whole[:2]]
        context = self.local_attn(*whole, *args, **kwargs)
        heads = shares(query.shape[_HEADS], groups, ranks)
        return exchange(context, self.spg, (dim, pieces), (_HEADS, heads))


def _to_heads(tensor: Tensor, dim: int, pieces: list[int], groups: int, group: AnyGroup) -> Tensor:
    heads = shares(tensor.shape[_HEADS], groups, len(pieces))
    return exchange(tensor, group, (_HEADS, heads), (dim, pieces))


def shares(heads: int, groups: int, ranks: int) -> list[int]:
    """How many heads each rank takes: whole groups that share keys and values, the first ranks more.

    Raises:
        ConfigError: there are fewer groups than ranks, or a group is not whole.
    """
    if groups < ranks or heads % groups:
        raise ConfigError(
            f"`num_kv_heads` must be at least the number of ranks that share a sequence ({ranks}) and "
            f"divide the heads ({heads}), but is {groups}; use fewer ranks"
        )
    size, larger = divmod(groups, ranks)
    return [(size + (rank < larger)) * (heads // groups) for rank in range(ranks)]


def rotated(tensor: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions applied to the first entries of each head, as many as the tables have."""
    turned, rest = tensor.split([cosines.shape[-1], tensor.shape[-1] - cosines.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cosines + torch.cat((-second, first), dim=-1) * sines, rest), dim=-1)


def exchange(
    tensor: Tensor, group: AnyGroup, cut: tuple[int, list[int]], join: tuple[int, list[int]]
) -> Tensor:
    """`exchanged`, with its gradient."""
    whole: Tensor = _Exchange.apply(tensor, group, cut, join)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return whole


class _Exchange(torch.autograd.Function):
    """Cuts a tensor along one dim, sends the pieces, and joins what comes along another dim.

    ``cut`` and ``join`` are a dim and every rank's size along it. The backward pass is the same, reversed.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: AnyGroup, cut: tuple[int, list[int]], join: tuple[int, list[int]]
    ) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return exchanged(tensor, group, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(grads[0], ctx.group, ctx.join, ctx.cut), None, None, None


def exchanged(
    tensor: Tensor, group: AnyGroup, cut: tuple[int, list[int]], join: tuple[int, list[int]]
) -> Tensor:
    """This rank's pieces from all ranks; see `_Exchange`."""
    (cut_dim, cut_sizes), (join_dim, join_sizes) = cut, join
    shape = list(tensor.shape)
    shape[cut_dim] = cut_sizes[get_rank(group)]
    sent = [piece.reshape(-1) for piece in tensor.split(cut_sizes, cut_dim)]
    shapes = [[*shape[:join_dim], size, *shape[join_dim + 1 :]] for size in join_sizes]
    sizes = [torch.Size(own).numel() for own in shapes]
    output = tensor.new_empty(sum(sizes))
    all_to_all_single(output, torch.cat(sent), sizes, [piece.numel() for piece in sent], group)
    return torch.cat(
        [part.view(own) for part, own in zip(output.split(sizes), shapes, strict=True)], join_dim
    )
