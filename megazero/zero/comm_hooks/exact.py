"""`ExactCommHook`: sends weights as they are, and gradients in a given dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.mpu.group import Group, Work
from megazero.zero.comm_hooks.comm_hook import CommHook, Reduction
from megazero.zero.layout import BucketLayout


class ExactCommHook(CommHook):
    """Sends weights as they are and gradients in `dtype`, in which they are also added.

    Args:
        group: the replicas.
        layout: the bucket's layout.
        dtype: dtype of gradients sent between ranks.
        leave_sums: whether the update rule sums the gradients itself.
        gathers: the group for gathers of weights; `group` by default.
    """

    def __init__(
        self,
        group: Group,
        layout: BucketLayout,
        dtype: torch.dtype,
        *,
        leave_sums: bool,
        gathers: Group | None = None,
    ):
        self.group = group
        self.gathers = gathers or group
        self.layout = layout
        self.dtype = dtype
        self.leave_sums = leave_sums

    @property
    def reduces(self) -> bool:
        # A single replica may have shards too: all of its sums, which are not kept where they add up.
        return (self.group.size > 1 or self.layout.row.shard_grads) and not self.leave_sums

    @property
    def rounds(self) -> bool:
        return False

    def begin(self, step: int) -> None:
        return None  # one step is like another

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        return self.gathers.all_gather(whole, shard, async_op=True)

    def round_weights(self, weights: Tensor) -> None:
        return None

    def weights_changed(self) -> None:
        return None  # nothing is kept

    def extra_bytes(self, sums: Tensor) -> int:
        return 0 if sums.dtype == self.dtype else sums.numel() * self.dtype.itemsize

    def reduce(self, sums: Tensor) -> Reduction:
        sent = sums.to(self.dtype)
        if not self.layout.row.shard_state:
            return Reduction(sent, self.group.all_reduce(sent, async_op=True))
        result = sent[self.layout.own]
        return Reduction(result, self.group.reduce_scatter(result, sent, async_op=True))
