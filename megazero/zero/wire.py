"""Wires: how a bucket's weights and gradient sums travel between its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megazero.mpu import Group, Work
from megazero.zero.layout import BucketLayout


@dataclass(frozen=True)
class Reduction:
    """Gradient sums in flight; keeps alive what the wire needs until they have landed.

    Attributes:
        result: the sums over the bucket's `state_range`, valid once `work` has been waited for.
        work: completes `result`; a wire that must process what arrived does so in `wait`.
    """

    result: Tensor
    work: Work


class Wire(Protocol):
    """One bucket's connection between the replicas. It may have state, such as what compression left out."""

    group: Group  # the replicas

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed over the group; otherwise the step uses each rank's own sums.

        It uses those if there is one replica, or if the update rule sums gradients itself.
        """

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        """Start to fill `whole` [padded] with every rank's `shard` [shard_size] of the weights."""

    def weights_changed(self) -> None:
        """Forget anything kept of weights gathered earlier."""

    def extra_bytes(self, sums: Tensor) -> int:
        """Bytes of memory that `reduce` takes in addition to `sums`, until the result has landed."""

    def reduce(self, sums: Tensor) -> Reduction:
        """Start to sum `sums` [padded] over the group; they may be overwritten."""


class ExactWire:
    """Sends weights as they are and gradients in `dtype`, in which they are also added.

    Args:
        group: the replicas.
        layout: the bucket's layout.
        dtype: dtype of gradients sent between ranks.
        leave_sums: whether the update rule sums the gradients itself.
    """

    def __init__(self, group: Group, layout: BucketLayout, dtype: torch.dtype, *, leave_sums: bool):
        self.group = group
        self.layout = layout
        self.dtype = dtype
        self.leave_sums = leave_sums

    @property
    def reduces(self) -> bool:
        # A single replica may have shards too: all of its sums, which are not kept where they add up.
        return (self.group.size > 1 or self.layout.row.shard_grads) and not self.leave_sums

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        return self.group.all_gather(whole, shard, async_op=True)

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


class NodeWire:
    """Keeps a second partition of gathered weights within the node (hpZ of ZeRO++, Wang et al. 2023).

    The first gather after a change goes over another wire, and each rank keeps a slice of the result; later
    gathers come from the slices on the node. Gradients travel over the other wire.

    Args:
        wire: the wire between all replicas.
        node: the replicas on this node; their number divides that of all replicas.
    """

    def __init__(self, wire: Wire, node: Group):
        self.group = wire.group
        self._wire = wire
        self._node = node
        self._kept: Tensor | None = None

    @property
    def reduces(self) -> bool:
        return self._wire.reduces

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        if self._kept is not None:
            return self._node.all_gather(whole, self._kept, async_op=True)
        return _Keeping(self, whole, self._wire.gather(whole, shard))

    def keep(self, whole: Tensor) -> None:
        """Keep this rank's slice of gathered weights."""
        size = whole.numel() // self._node.size
        self._kept = whole[self._node.rank * size : (self._node.rank + 1) * size].clone()

    def weights_changed(self) -> None:
        self._kept = None
        self._wire.weights_changed()

    def extra_bytes(self, sums: Tensor) -> int:
        return self._wire.extra_bytes(sums)

    def reduce(self, sums: Tensor) -> Reduction:
        return self._wire.reduce(sums)


@dataclass(frozen=True)
class _Keeping:
    """A gather whose result the wire keeps a slice of."""

    wire: NodeWire
    whole: Tensor
    work: Work

    def wait(self) -> None:
        self.work.wait()
        self.wire.keep(self.whole)
