"""`DataParallel`: what a training step tells the data-parallel side, at the moments when it has to know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megazero.mpu import ParallelContext
from megazero.zero.bucket import Bucket, Presence
from megazero.zero.gather import Gatherer
from megazero.zero.policy import ZeroPolicy
from megazero.zero.reduce import GradientReducer
from megazero.zero.unit import Unit


class DataParallel:
    """Gathers weights and reduces gradients around each chunk's forward and backward.

    Use, per step: `start`; for each chunk and micro-batch the forward, and between `begin_backward` and
    `end_backward` the backward; `finish`. `gather` and `release` say which chunk runs when, for earlier
    gathers and less memory.

    Args:
        units: in the order in which forward uses them.
        buckets: `build_buckets` of these units.
        policy: as given to `build_buckets`.
        context: groups.
    """

    def __init__(
        self, units: Sequence[Unit], buckets: Sequence[Bucket], policy: ZeroPolicy, context: ParallelContext
    ):
        trained = [bucket for bucket in buckets if bucket.key.trainable]
        self.buckets = list(buckets)
        self._reducer = GradientReducer(trained, policy, context)
        self._gatherer = Gatherer(units, buckets, policy)
        self._chunk = 0
        for bucket in trained:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(self.collect)

    def start(self) -> None:
        """A step begins: forget the previous one's gradients, and all that an interrupted one left."""
        self._reducer.start()
        self._gatherer.finish()

    def gather(self, chunk: int, *, backward: bool = False) -> None:
        """The chunk's forward (or backward) is about to run: start gathering its first units."""
        self._gatherer.hint(chunk, backward=backward)

    def release(self, chunk: int) -> None:
        """The chunk's compute is over for now: free what the policy does not keep."""
        self._gatherer.release(chunk)

    def begin_backward(self, chunk: int, *, reduce: bool) -> None:
        """The next backward is the chunk's; with `reduce`, its buckets are then complete and reduced."""
        self._chunk = chunk
        self._reducer.begin(chunk, reduce=reduce)
        self._gatherer.begin_backward(chunk)

    def collect(self, param: nn.Parameter) -> None:
        """Take `param.grad`; a hook does it where autograd accumulates, other code calls it itself."""
        self._reducer.collect(param)
        self._gatherer.collected(param)

    def end_backward(self) -> None:
        """The backward is over: start the reductions that are due, and free weights."""
        self._reducer.end()
        self._gatherer.end_backward(self._chunk)

    def finish(self) -> None:
        """Return when the step's gradient sums are complete; frees all gathered weights."""
        self._reducer.finish()
        self._gatherer.finish()

    def need(self, params: Iterable[nn.Parameter]) -> None:
        """Return when these parameters are whole; they are freed as if their own modules had used them."""
        absent = [b for b in self._gatherer.of(params) if b.presence is not Presence.WHOLE]
        for bucket in absent:
            self._gatherer.fetch(bucket)
        for bucket in absent:
            bucket.arrive()

    @contextmanager
    def gathered(
        self, params: Iterable[nn.Parameter] | None = None, *, write_back: bool = False
    ) -> Iterator[None]:
        """Within it, all parameters (or these) can be read whole; every rank enters. Without autograd.

        Args:
            params: which; None for all.
            write_back: take over what is written to them, which must be the same on every rank.
        """
        wanted = None if params is None else {id(p) for p in params}
        chosen = [b for b in self.buckets if wanted is None or any(id(p) in wanted for p in b.params)]
        absent = [b for b in chosen if b.presence is not Presence.WHOLE]
        for bucket in absent:
            self._gatherer.fetch(bucket)
        for bucket in absent:
            bucket.arrive()
        try:
            with torch.no_grad():
                yield
                if write_back:
                    for bucket in chosen:
                        bucket.adopt_full()
        finally:
            for bucket in absent:
                self._gatherer.free(bucket)
