"""`QuantizedGradients`: sums gradients by exchanging codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu.group import DONE, Group, Work
from megazero.mpu.rng import derive_key
from megazero.ops.quantize import Quantization, dequantize, quantize
from megazero.zero.comm_hooks.comm_hook import CommHook, Reduction, WrappedCommHook
from megazero.zero.layout import BucketLayout


@dataclass(frozen=True)
class Rounding:
    """The way in which gradients are rounded.

    Attributes:
        how: the kind of codes, and the elements per scale.
        seed: the seed of stochastic rounding; None rounds to the nearest code.
    """

    how: Quantization
    seed: int | None = None

    def key(self, *path: str | int) -> int | None:
        """The key of the random bits of one tensor."""
        return None if self.seed is None else derive_key(self.seed, "rounding", *path)


class QuantizedGradients(WrappedCommHook):
    """Sums gradients in one all-to-all of codes per hop (qgZ of ZeRO++, Wang et al. 2023).

    On two hops, the first within the node: each rank sends every other rank on its node the slices that this
    one's peers on all nodes own, and adds up what it receives; the second hop does the same with the sums
    between the nodes. A value is rounded once per hop, not once per rank as on a ring. All sums are in fp32,
    in the order of the ranks.

    The error of a sum is at most half a step (`Quantization.step`; with stochastic rounding a whole one) of
    each replica's own value, and of each node's sum if there are two hops.

    Args:
        comm_hook: the hook for the weights.
        layout: the bucket's layout; it shards the sums.
        hops: the groups of the hops. The product of their sizes is the number of replicas, and ranks of the
            first hop are adjacent among the replicas.
        rounding: how gradients are rounded.
    """

    def __init__(self, comm_hook: CommHook, layout: BucketLayout, hops: Sequence[Group], rounding: Rounding):
        super().__init__(comm_hook)
        self._layout = layout
        self._hops = tuple(hops)
        self._rounding = rounding
        self._step = 0
        self._calls = 0

    def begin(self, step: int) -> None:
        super().begin(step)
        self._step, self._calls = step, 0

    def extra_bytes(self, sums: Tensor) -> int:
        # The codes that the first hop sends and receives, and the sums of those it receives.
        size, slices = self._layout.shard_size, self._layout.ranks
        return 2 * slices * self._rounding.how.row_bytes(size) + 4 * size * slices // self._hops[0].size

    def reduce(self, sums: Tensor) -> Reduction:
        self._calls += 1
        result = sums.new_empty(self._layout.shard_size, dtype=torch.float32)
        works = _Hops(self._hops, self._rounding, self._path(), result)
        works.start(sums.view(self._layout.ranks, -1))
        return Reduction(result, works)

    def _path(self) -> tuple[str | int, ...]:
        """The name of this reduction on this rank; the same on tensor-parallel ranks that hold copies."""
        return (self._layout.specs[0].name, self._step, self._calls, self._layout.rank)


class _Hops(Work):
    """A sum on its way, hop after hop; the first is started, the others run when the result is waited for."""

    def __init__(
        self, hops: Sequence[Group], rounding: Rounding, path: tuple[str | int, ...], result: Tensor
    ):
        self._hops = list(hops)
        self._rounding = rounding
        self._path = path
        self._result = result
        self._sent: Tensor | None = None  # kept alive until it has arrived
        self._received: Tensor | None = None
        self._work: Work = DONE

    @torch.no_grad()
    def start(self, slices: Tensor) -> None:
        """Send slices [owners, shard_size] on the next hop, whose ranks are the owners' fastest part."""
        group = self._hops.pop(0)
        key = self._rounding.key(*self._path, len(self._hops))
        packed = quantize(slices, self._rounding.how, key)
        self._sent = packed.view(-1, group.size, packed.shape[1]).transpose(0, 1).contiguous()
        self._received = torch.empty_like(self._sent)
        self._work = group.all_to_all(self._received, self._sent, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        while self._hops:
            self.start(self._summed())
            self._work.wait()
        self._result.copy_(self._summed().view(-1))
        self._sent = self._received = None

    @torch.no_grad()
    def _summed(self) -> Tensor:
        """The sums over the ranks of the hop, fp32 [owners, shard_size]."""
        assert self._received is not None, "a sum is waited for once, after its start"
        size, how = self._result.numel(), self._rounding.how
        first, *others = self._received
        total = dequantize(first, size, how, torch.float32)
        for other in others:
            total += dequantize(other, size, how, torch.float32)
        return total
