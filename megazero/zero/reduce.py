"""Gradient sums: over micro-batches in fp32, then over the ranks that hold the same parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megazero.mpu import ParallelContext, Work
from megazero.zero.bucket import Bucket


class GradientReducer:
    """Collects each parameter's gradient as backward produces it and reduces whole buckets.

    Use: `start`, then one backward per micro-batch, with `last_backward` called before the last; `finish`
    returns when `Bucket.grads` hold the sums over the whole global batch.

    Args:
        buckets: in the order in which backward fills them.
        overlap: reduce a bucket as soon as the last backward has filled it, instead of after.
    """

    def __init__(self, buckets: Sequence[Bucket], context: ParallelContext, *, overlap: bool = True):
        self.buckets = list(buckets)
        self.context = context
        self.overlap = overlap
        self._last = False
        self._written = [[False] * len(b.params) for b in self.buckets]
        self._missing = [len(b.params) for b in self.buckets]
        self._next = 0
        self._works: list[Work] = []
        for b, bucket in enumerate(self.buckets):
            for i, (param, view) in enumerate(zip(bucket.params, bucket.views(bucket.grads), strict=True)):
                param.register_post_accumulate_grad_hook(self._collector(b, i, view))

    def start(self) -> None:
        """Forget the previous step's gradients."""
        self._last = False
        self._written = [[False] * len(b.params) for b in self.buckets]
        self._missing = [len(b.params) for b in self.buckets]
        self._next = 0
        self._works = []

    def last_backward(self) -> None:
        """The next backward is the step's last: what it fills is complete."""
        self._last = True

    def finish(self) -> None:
        """Reduce what is not under way yet and wait for all of it."""
        self._launch_up_to(len(self.buckets))
        for work in self._works:
            work.wait()
        # Sums over the sequence's parts come last: they need a second group.
        for bucket in self.buckets:
            if bucket.key.partial_grad:
                self.context.tp.all_reduce(bucket.grads).wait()

    def _collector(self, b: int, i: int, view: torch.Tensor):
        def collect(param: nn.Parameter) -> None:
            if self._written[b][i]:
                view.add_(param.grad)
            else:
                view.copy_(param.grad)
                self._written[b][i] = True
            param.grad = None
            if self._last:
                self._missing[b] -= 1
                if self.overlap:
                    self._launch_full()

        return collect

    def _launch_full(self) -> None:
        # In bucket order only, so that every rank makes the same calls whatever its autograd's order.
        ready = self._next
        while ready < len(self.buckets) and self._missing[ready] == 0:
            ready += 1
        self._launch_up_to(ready)

    def _launch_up_to(self, end: int) -> None:
        for b in range(self._next, end):
            bucket = self.buckets[b]
            if not all(self._written[b]):
                for written, view in zip(self._written[b], bucket.views(bucket.grads), strict=True):
                    if not written:
                        view.zero_()
            group = self.context.groups["expert_replica" if bucket.key.expert else "replica"]
            if group.size > 1:
                self._works.append(group.all_reduce(bucket.grads, async_op=True))
        self._next = end
