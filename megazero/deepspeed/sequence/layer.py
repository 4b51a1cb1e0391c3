"""Ulysses (arXiv:2309.14509): attention over a sequence that ranks share, by all-to-all exchanges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megazero.deepspeed.comm.groups import logged_group
from megazero.deepspeed.comm.world import AnyGroup
from megazero.errors import ConfigError
from megazero.layers.collectives import gather_rows
from megazero.layers.context.heads import HeadPlan, exchange_heads, return_heads
from megazero.mpu.group import Group

_HEADS = 2  # the dim of heads


class DistributedAttention(nn.Module):
    """Runs an attention of whole sequences on ranks that hold a piece of each sequence.

    An exchange gives each rank the whole sequence for a share of the heads; after attention, another gives it
    all heads for its piece. Heads need not divide by the ranks: the first ranks take more. Query heads that
    share keys and values stay on one rank. If there are fewer such groups than ranks, ranks get copies of the
    keys and values that their query heads use.

    Args:
        local_attention: called with query, key and value of whole sequences; its result has the query's
            shape, or ``[s, b, h]`` (``[b, s, h]``).
        sequence_process_group: the ranks that share a sequence, with pieces of equal length; None for all.
        scatter_idx: the dim of the heads, 2.
        gather_idx: the dim of the sequence, 0 or 1; has no effect, because `forward` has `batch_dim_idx`.
        sp_stream: has no effect; exchanges run one after the other.
        num_kv_heads: the number of groups of heads that stay together; by default the number of key heads.

    Raises:
        ConfigError: the heads or the sequence are in another dim.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: AnyGroup,
        scatter_idx: int = _HEADS,
        gather_idx: int = 0,
        sp_stream: object = None,
        num_kv_heads: int | None = None,
    ):
        super().__init__()
        if scatter_idx != _HEADS:
            raise ConfigError(
                f"`scatter_idx` must be 2, the dim of the heads, but is {scatter_idx}; leave it out"
            )
        if gather_idx not in (0, 1):
            raise ConfigError(
                f"`gather_idx` must be 0 or 1, the dim of the sequence, but is {gather_idx}; leave it out"
            )
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.num_kv_heads = num_kv_heads
        self._checked = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 1,
        rotary_pos_emb: Sequence[Tensor] | None = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """Return the attention of this rank's piece, in the layout of the query.

        On a CPU each call checks that pieces have equal lengths. On an accelerator only the first call does,
        because the check waits for the device.

        Args:
            query, key, value: ``[s/p, b, heads, d]``, or ``[b, s/p, heads, d]`` with `batch_dim_idx` 0.
            batch_dim_idx: the dim of the batch.
            rotary_pos_emb: cosines and sines ``[b, s, 1, d]`` of whole sequences, or None.
            args, kwargs: passed to the local attention.

        Raises:
            ConfigError: there are fewer heads than ranks, query heads are no multiple of key heads, pieces
                differ in length, or `batch_dim_idx` is neither 0 nor 1.
        """
        if batch_dim_idx not in (0, 1):
            raise ConfigError(
                f"`batch_dim_idx` must be 0 or 1, but is {batch_dim_idx}; transpose the tensors"
            )
        group = logged_group(self.spg)
        q, k, v = (_sequence_first(x, batch_dim_idx) for x in (query, key, value))
        if q.device.type == "cpu" or not self._checked:
            check_pieces(q, group)
            self._checked = True
        heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
        plan = HeadPlan(heads, kv_heads, group.size, group.rank, self.num_kv_heads or kv_heads)
        q, k, v = exchange_heads(q, k, v, plan, group)
        if rotary_pos_emb is not None:
            cosines, sines = (table.transpose(0, 1) for table in rotary_pos_emb)
            q, k = (rotated(x, cosines, sines) for x in (q, k))
        whole = (_sequence_first(x, batch_dim_idx).contiguous() for x in (q, k, v))
        context = _sequence_first(self.local_attn(*whole, *args, **kwargs), batch_dim_idx)
        result = return_heads(context.flatten(_HEADS), plan, group)
        if context.dim() > _HEADS + 1:
            result = result.unflatten(_HEADS, (heads, -1))
        return _sequence_first(result, batch_dim_idx).contiguous()


def _sequence_first(x: Tensor, batch_dim: int) -> Tensor:
    """Swap the first two dims if the batch is the first one: [b, s, ...] <-> [s, b, ...]."""
    return x.transpose(0, 1) if batch_dim == 0 else x


def rotated(tensor: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary positions to the first d channels of each head, for tables [..., d]."""
    channels, rest = tensor.split([cosines.shape[-1], tensor.shape[-1] - cosines.shape[-1]], dim=-1)
    first, second = channels.chunk(2, dim=-1)
    return torch.cat((channels * cosines + torch.cat((-second, first), dim=-1) * sines, rest), dim=-1)


def check_pieces(x: Tensor, group: Group) -> None:
    """Check that the pieces ``[s/p, b, ...]`` of all ranks have equal lengths; every rank calls this.

    Raises:
        ConfigError: lengths or batch sizes differ; an exchange would hang or mix up samples.
    """
    if group.size == 1:
        return
    shapes = gather_rows(torch.tensor([x.shape[:2]], device=x.device), group).tolist()
    for dim, sizes in zip(("rows", "samples"), zip(*shapes, strict=True), strict=True):
        if len(set(sizes)) > 1:
            raise ConfigError(
                f"`query` must have equally many {dim} on the {group.size} ranks that share a sequence, but "
                f"has {', '.join(map(str, sizes))}; pad sequences to a multiple of {group.size}, and give "
                "these ranks pieces of the same samples"
            )
