"""`NodeCommHook`: gathers from a second partition within the node."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megazero.mpu.group import Group, Work
from megazero.zero.comm_hooks.comm_hook import CommHook, WrappedCommHook


class NodeCommHook(WrappedCommHook):
    """Keeps a second partition of gathered weights within the node (hpZ of ZeRO++, Wang et al. 2023).

    The first gather after a change goes over another hook, and each rank keeps a slice of the result; later
    gathers come from the slices on the node, exactly as the first one brought them. Gradients travel over the
    other hook.

    Args:
        comm_hook: the hook between all replicas.
        node: the replicas on this node; their number divides the number of all replicas.
    """

    def __init__(self, comm_hook: CommHook, node: Group):
        super().__init__(comm_hook)
        self._node = node
        self._kept: Tensor | None = None

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        if self._kept is not None:
            return self._node.all_gather(whole, self._kept, async_op=True)
        return _Keeping(self, whole, self._comm_hook.gather(whole, shard))

    def keep(self, whole: Tensor) -> None:
        """Keep this rank's slice of gathered weights."""
        size = whole.numel() // self._node.size
        self._kept = whole[self._node.rank * size : (self._node.rank + 1) * size].clone()

    def weights_changed(self) -> None:
        self._kept = None
        self._comm_hook.weights_changed()


@dataclass(frozen=True)
class _Keeping(Work):
    """A gather; once it has arrived, the hook keeps a slice of its result."""

    comm_hook: NodeCommHook
    whole: Tensor
    work: Work

    def wait(self) -> None:
        self.work.wait()
        self.comm_hook.keep(self.whole)
