"""`DataParallel`: the calls by which a training step drives gathers and reductions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megazero.mpu.context import ParallelContext
from megazero.ops.product_sum import Product
from megazero.zero.bucket import Bucket, ShardedState
from megazero.zero.gather import Gatherer
from megazero.zero.policy import ZeroPolicy
from megazero.zero.reduce import GradientReducer, Observer
from megazero.zero.store.store import WEIGHT, Store
from megazero.zero.unit import Unit


class DataParallel:
    """Gathers weights and reduces gradients around each chunk's forward and backward.

    Usage, per step: call `start`; for each chunk and micro-batch run the forward, and the backward between
    `begin_backward` and `end_backward`; call `finish`. `reduce` starts reductions that no backward made while
    it ran. `gather` and `release` say which chunk runs when, for earlier gathers and less memory.

    Args:
        units: the units in the order in which forward uses them.
        store: the store that `build_store` made of these units.
        policy: the policy given to `build_store`.
        context: the process groups.
        late: whether weights that an update gathers are waited for by the units that use them, beside whose
            forward they arrive; otherwise the update waits. Then nobody else reads weights in between.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        store: Store,
        policy: ZeroPolicy,
        context: ParallelContext,
        *,
        late: bool = False,
    ):
        self.store = store
        self._reducer = GradientReducer(store, policy, context)
        self._gatherer = Gatherer(units, store, policy, late=late)
        self._chunk = 0
        for bucket in store.buckets:
            for param in bucket.params if bucket.key.trainable else ():
                param.register_post_accumulate_grad_hook(self.collect)

    def observe(self, observer: Observer) -> None:
        """Show each bucket's gradients on this rank to `observer` before they are reduced."""
        self._reducer.observer = observer

    @property
    def most_buffer_bytes(self) -> tuple[int, int]:
        """The most bytes at a time of gathered weights, and of transient gradient buffers."""
        return self._gatherer.most_live_bytes, self._reducer.most_buffer_bytes

    def start(self, step: int = 0) -> None:
        """Begin a step: forget the previous step's gradients, and all that an interrupted one left behind.

        Args:
            step: its number, with which stochastic rounding of gradients changes.
        """
        self._reducer.start(step)
        self._gatherer.finish()

    def gather(self, chunk: int, *, backward: bool = False) -> None:
        """Start gathering the chunk's first units, because its forward (or backward) is about to run."""
        self._gatherer.hint(chunk, backward=backward)

    def release(self, chunk: int) -> None:
        """Free the weights that the policy does not keep, because the chunk does not compute for now."""
        self._gatherer.release(chunk)

    def begin_backward(self, chunk: int, *, reduce: bool, ends: bool = True) -> None:
        """Announce that the next backward is the chunk's.

        Args:
            chunk: the chunk.
            reduce: whether this backward completes sums; each bucket is then reduced once it is complete.
            ends: whether this is the last backward to bring gradients of its micro-batch.
        """
        self._chunk = chunk
        self._reducer.begin(chunk, reduce=reduce, ends=ends)
        self._gatherer.begin_backward(chunk)

    def collect(self, param: nn.Parameter, product: Product | None = None) -> None:
        """Take `param.grad`, or a gradient that is still a product.

        A hook calls this where autograd accumulates, other code calls it itself.
        """
        self._reducer.collect(param, product)
        self._gatherer.collected(param)

    def end_backward(self) -> None:
        """End the backward: start the reductions that are due, and free weights."""
        self._reducer.end()
        self._gatherer.end_backward(self._chunk)

    def reduce(self, chunk: int) -> None:
        """Start reducing all gradients of the chunk that no backward has reduced."""
        self._reducer.reduce(chunk)

    def finish(self) -> None:
        """Wait until the step's gradient sums are complete, and free all gathered weights."""
        self._reducer.finish()
        self._gatherer.finish()
        self._gatherer.arrive()

    def need(self, params: Iterable[nn.Parameter]) -> None:
        """Wait until these parameters are whole; they are freed as if their own modules had used them."""
        absent = [b for b in self._gatherer.of(params) if b.presence is not ShardedState.WHOLE]
        for bucket in absent:
            self._gatherer.unshard(bucket)
        for bucket in absent:
            bucket.wait()

    @contextmanager
    def gathered(
        self, params: Iterable[nn.Parameter] | None = None, *, write_back: bool = False
    ) -> Iterator[None]:
        """Context in which parameters are whole and can be read, without autograd; every rank enters it.

        Args:
            params: the parameters to gather; None for all.
            write_back: keep changes to them, which must be the same on every rank.
        """
        wanted = None if params is None else {id(p) for p in params}
        chosen = [b for b in self.store.buckets if wanted is None or any(id(p) in wanted for p in b.params)]
        absent = [b for b in chosen if b.presence is not ShardedState.WHOLE]
        for bucket in absent:
            self._gatherer.unshard(bucket)
        for bucket in absent:
            bucket.wait()
        sharded = [bucket for bucket in chosen if bucket.layout.row.shard_params]
        try:
            with torch.no_grad(), self._gatherer.held(sharded):
                if write_back:
                    self._show_masters(chosen)
                yield
                if write_back:
                    for bucket in chosen:
                        bucket.adopt_full()
        finally:
            for bucket in absent:
                self._gatherer.reshard(bucket)

    def _show_masters(self, buckets: Sequence[Bucket]) -> None:
        """Where gathers round weights, gather exact ones: those that are not overwritten must not change."""
        for loaded_buckets in self.store.stream((WEIGHT,), [b for b in buckets if b.comm_hook.rounds]):
            for loaded in loaded_buckets:
                loaded.bucket.show_masters(loaded.flats[WEIGHT])
