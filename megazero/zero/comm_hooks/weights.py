"""`QuantizedWeights`: gathers codes instead of weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu.group import Work
from megazero.ops.chunks import row_chunks
from megazero.ops.quantize import Quantization, dequantize, quantize
from megazero.zero.comm_hooks.comm_hook import CommHook, WrappedCommHook
from megazero.zero.layout import BucketLayout


class QuantizedWeights(WrappedCommHook):
    """Gathers the codes and scales of each shard (qwZ of ZeRO++, Wang et al. 2023), rounded to the nearest.

    Every rank dequantizes the same bytes, those of its own shard too, so replicas hold the same bits. Shards
    are never made from gathered weights, so the error is that of one rounding, however many steps there have
    been. Until it has arrived, a gather takes `Quantization.row_bytes(shard_size)` bytes for each replica.

    Args:
        comm_hook: the hook for the gradients.
        layout: the bucket's layout.
        how: kind of codes, and elements per scale.
    """

    def __init__(self, comm_hook: CommHook, layout: BucketLayout, how: Quantization):
        super().__init__(comm_hook)
        self._layout = layout
        self._how = how

    @property
    def rounds(self) -> bool:
        return True

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        sent = quantize(shard.view(1, -1), self._how)
        received = sent.new_empty(self.group.size, sent.shape[1])
        work = self.gathers.all_gather(received, sent, async_op=True)
        return _Arriving(sent, received, whole, self._how, work)

    @torch.no_grad()
    def round_weights(self, weights: Tensor) -> None:
        shards = weights.view(-1, self._layout.shard_size)
        for some in row_chunks(shards, *shards.shape):
            _unpack(quantize(shards[some], self._how), shards[some], self._how)


@dataclass(frozen=True)
class _Arriving(Work):
    """Codes of all shards on their way to the buffer of the weights; keeps those that are sent alive."""

    sent: Tensor
    received: Tensor
    whole: Tensor
    how: Quantization
    work: Work

    @torch.no_grad()
    def wait(self) -> None:
        self.work.wait()
        shards = self.whole.view(len(self.received), -1)
        # Some shards at a time: dequantized weights take temporary memory.
        for some in row_chunks(shards, *shards.shape):
            _unpack(self.received[some], shards[some], self.how)


def _unpack(packed: Tensor, shards: Tensor, how: Quantization) -> None:
    shards.copy_(dequantize(packed, shards.shape[1], how, shards.dtype))
