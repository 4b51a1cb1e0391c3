"""`CommHook`: the calls that a bucket makes to its connection to the replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megazero.mpu.group import Group, Work


@dataclass(frozen=True)
class Reduction:
    """Gradient sums in flight; keeps the hook's buffers alive until they have landed.

    Attributes:
        result: the sums over the bucket's `state_range`, valid once `work` has been waited for.
        work: completes `result`; a hook that has to process what arrives does so in its `wait`.
    """

    result: Tensor
    work: Work


class CommHook(Protocol):
    """One bucket's connection between the replicas. It may have state, such as the errors of compression."""

    group: Group  # the replicas
    gathers: Group  # the same ranks, for gathers of weights

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed over the group; otherwise the step uses each rank's own sums.

        It uses those if there is one replica, or if the update rule sums gradients itself.
        """

    @property
    def rounds(self) -> bool:
        """Whether gathered weights differ from the weights that were sent."""

    def begin(self, step: int) -> None:
        """Begin a step, or another attempt at it: `reduce` now gets its gradients."""

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        """Start to fill `whole` [padded] with every rank's `shard` [shard_size] of the weights.

        Where the hook rounds, a rank's own slice is rounded like all others.
        """

    def round_weights(self, weights: Tensor) -> None:
        """Round whole shards of weights, [n * shard_size], in place, exactly as a gather does."""

    def weights_changed(self) -> None:
        """Forget any copies of weights that were gathered earlier."""

    def extra_bytes(self, sums: Tensor) -> int:
        """Bytes of memory that `reduce` takes in addition to `sums`, until the result has landed."""

    def reduce(self, sums: Tensor) -> Reduction:
        """Start to sum `sums` [padded] over the group; they may be overwritten."""


class WrappedCommHook(CommHook):
    """A hook that passes each call on to another hook; subclasses change a part.

    Args:
        comm_hook: the other hook.
    """

    def __init__(self, comm_hook: CommHook):
        self.group = comm_hook.group
        self.gathers = comm_hook.gathers
        self._comm_hook = comm_hook

    @property
    def reduces(self) -> bool:
        return self._comm_hook.reduces

    @property
    def rounds(self) -> bool:
        return self._comm_hook.rounds

    def begin(self, step: int) -> None:
        self._comm_hook.begin(step)

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        return self._comm_hook.gather(whole, shard)

    def round_weights(self, weights: Tensor) -> None:
        self._comm_hook.round_weights(weights)

    def weights_changed(self) -> None:
        self._comm_hook.weights_changed()

    def extra_bytes(self, sums: Tensor) -> int:
        return self._comm_hook.extra_bytes(sums)

    def reduce(self, sums: Tensor) -> Reduction:
        return self._comm_hook.reduce(sums)
