"""Gradient sums: over micro-batches, and over the ranks that hold the same parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megazero.mpu.context import ParallelContext
from megazero.mpu.host import on_device
from megazero.mpu.param_spec import SHARERS
from megazero.ops.product_sum import Product
from megazero.zero.bucket import Bucket
from megazero.zero.comm_hooks.comm_hook import Reduction
from megazero.zero.fill import Fill, value_of
from megazero.zero.layout import own_sums
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.store import GRADIENT, Store

# How many buffers besides the sums may be held by reductions in flight while the next bucket fills. One hides
# a reduction behind backward; a second would cost one more buffer, and mostly queue behind the first.
_IN_FLIGHT = 1

Observer = Callable[[Bucket, Tensor], None]
"""Sees a bucket, and this rank's own gradients of it, [padded], before they are reduced."""


class GradientReducer:
    """Collects each parameter's gradient as backward produces it and reduces whole buckets.

    Usage: call `start`; then `begin`, one backward and `end` for each chunk and micro-batch; `finish` returns
    when the store has the sums over the whole global batch.

    Gradients that are whole on each rank are summed over the micro-batches in place and reduced once. Sharded
    gradients go through transient buffers, each the size of a bucket, which are reduced and added to the
    shard. Within a chunk, reductions always start in bucket order, so every rank makes the same calls no
    matter in which order its autograd runs.

    There are never more than two transient buffers: one in flight, and one being filled for the bucket whose
    turn it is in a backward that reduces. Gradients that arrive before their turn, or in a backward that
    reduces nothing, are kept as they are, or as sums over micro-batches that are no larger. The half of a
    backward that computes the gradient of the input leaves the gradients of biases and norms in this way.

    Args:
        store: the store; its buckets are in the order in which backward completes them.
        policy: dtypes and the size of buckets.
        context: the groups for the sums over tensor-parallel ranks and tied parameters.

    Attributes:
        observer: called before each reduction; None for nobody.
    """

    def __init__(self, store: Store, policy: ZeroPolicy, context: ParallelContext):
        buckets = [bucket for bucket in store.buckets if bucket.key.trainable]
        self.store = store
        self.context = context
        self.policy = policy
        self.observer: Observer | None = None
        self._progress = [_BucketSums(bucket) for bucket in buckets]
        self._place = {
            id(param): (progress, i)
            for progress in self._progress
            for i, param in enumerate(progress.bucket.params)
        }
        chunks = sorted({bucket.key.chunk for bucket in buckets})
        self._chunks = {c: [p for p in self._progress if p.bucket.key.chunk == c] for c in chunks}
        self._buffers = _BufferPool(buckets, policy)
        self._flights: deque[_Flight] = deque()
        self._owed: set[int] = set(chunks)
        self._current: int | None = None
        self._reduce = False
        self._ends = True
        self._next = 0

    @property
    def most_buffer_bytes(self) -> int:
        """The most bytes that transient buffers have held at a time."""
        return self._buffers.most_bytes

    def start(self, step: int = 0) -> None:
        """Forget the previous step's gradients; see `DataParallel.start`."""
        for progress in self._progress:
            progress.start()
            progress.bucket.comm_hook.begin(step)
        self._flights.clear()
        self._owed = set(self._chunks)
        self._current = None

    def begin(self, chunk: int, *, reduce: bool, ends: bool = True) -> None:
        """Announce that the next backward is `chunk`'s.

        Args:
            chunk: the chunk.
            reduce: whether to reduce each sum as soon as this backward completes it.
            ends: whether this is the last backward of its micro-batch; earlier ones may have brought the
                gradients of other parameters.
        """
        assert self._current is None, f"the backward of chunk {self._current} has not ended"
        assert ends or not reduce, f"chunk {chunk}: a backward that does not end completes nothing"
        self._current, self._reduce, self._ends, self._next = chunk, reduce, ends, 0
        for progress in self._of(chunk):
            progress.begin()

    def collect(self, param: nn.Parameter, product: Product | None = None) -> None:
        """Take over `param.grad`, or a gradient that is still a product."""
        progress, slot = self._place[id(param)]
        bucket = progress.bucket
        assert self._current is not None, f"{bucket.layout.specs[slot].name}: a gradient outside a backward"
        # Taken away, so that autograd neither keeps it for the whole backward nor adds the next one to it.
        grad, param.grad = product or param.grad, None
        assert grad is not None, f"{bucket.layout.specs[slot].name}: no gradient to take"
        # A buffer for a bucket out of turn would be held until its turn comes: a third one, or worse.
        if progress.fill is not None:
            progress.fill.add(slot, grad)
        elif progress.needs_buffer and not self._has_turn(progress):
            progress.wait(slot, value_of(grad), self.policy.dtypes.reduce)
        else:
            self._open(progress).add(slot, grad)
        # One parameter that two chunks on this rank use: it has its turn in its own chunk's backward, or in
        # `reduce`. Here its call would come between those of another chunk, which not every rank has.
        if bucket.key.chunk != self._current:
            return
        progress.missing.discard(slot)
        if not self._ends:
            progress.early.add(slot)
        if self._reduce:
            self._launch_complete()

    def end(self) -> None:
        """End the chunk's backward; if it reduces, start the reductions that have not started yet."""
        chunk = self._current
        assert chunk is not None, "no backward has begun"
        if self._reduce:
            self._launch_all(chunk)
        else:
            self._owed.add(chunk)
        for progress in self._progress:
            if progress.fill is not None:
                progress.fill.settle()
        self._current = None

    def reduce(self, chunk: int) -> None:
        """Start reducing all gradients of the chunk that have arrived and have not been reduced yet."""
        assert self._current is None, f"the backward of chunk {self._current} has not ended"
        # Even if everything has been reduced, a gradient may have arrived late from another chunk's backward.
        self._next = 0 if chunk in self._owed else len(self._of(chunk))
        self._launch_all(chunk)

    def finish(self) -> None:
        """Reduce everything that has not been reduced yet, and wait until the step's sums are complete."""
        for chunk in self._chunks:
            self.reduce(chunk)
        # Before anything else reads the sums: what is in flight has not been added to them.
        while self._flights:
            self._land()
        for progress in self._progress:
            if not progress.bucket.comm_hook.reduces:
                sums = own_sums(progress.bucket.layout, self.store.sums(progress.bucket))
                self._take(progress.bucket, sums, first=True)
        # After the reductions, because then one call on this rank's slice of the sums over all micro-batches
        # does for all: sums are linear. Which of the two comes first is free, but must be the same on every
        # rank: calls of two groups in different orders can wait for each other in a circle.
        self._sum_over_sequence()
        self._sum_over_ends()

    def _of(self, chunk: int) -> list[_BucketSums]:
        return self._chunks.get(chunk, [])

    def _has_turn(self, progress: _BucketSums) -> bool:
        """Whether the bucket is the next one that the current backward reduces."""
        assert self._current is not None, "no backward has begun"
        chunk = self._of(self._current)
        return self._reduce and self._next < len(chunk) and chunk[self._next] is progress

    def _open(self, progress: _BucketSums) -> Fill:
        """The buffer that currently takes the bucket's gradients."""
        if progress.fill is None:
            bucket = progress.bucket
            transient = progress.needs_buffer
            source = self._buffers.take(bucket) if transient else self.store.sums(bucket)
            progress.fill = Fill(bucket, source, transient=transient)
            while progress.waiting:
                progress.fill.add(*progress.waiting.popitem())
        return progress.fill

    def _launch_complete(self) -> None:
        assert self._current is not None, "no backward has begun"
        chunk = self._of(self._current)
        # A complete bucket behind an incomplete one waits: on another rank autograd may complete them in the
        # other order, and a collective is matched by its place in the order of calls alone.
        while self._next < len(chunk) and not chunk[self._next].missing:
            self._launch(chunk[self._next])
            self._next += 1

    def _launch_all(self, chunk: int) -> None:
        for progress in self._of(chunk)[self._next :]:
            self._launch(progress)
        # Gradients that arrived after their bucket was reduced (a module that two reentrant checkpoints use).
        for progress in self._of(chunk)[: self._next]:
            if progress.fill is not None or progress.waiting:
                self._launch(progress)
        self._owed.discard(chunk)

    @torch.no_grad()
    def _launch(self, progress: _BucketSums) -> None:
        """Start reducing the bucket's buffer, with zeros where no gradient has arrived."""
        # Opened even if no gradient has arrived: the other ranks of the group make this call too.
        bucket, fill = progress.bucket, self._open(progress)
        fill.complete()
        if self.observer is not None:  # now, as the reduction overwrites this rank's own gradients
            self.observer(bucket, fill.buffer)
        if not bucket.comm_hook.reduces:  # the sums are complete as they are, and more can be added
            return
        # From here on the buffer is the group's until `_land`: a gradient that still comes opens another one.
        first, progress.fill, progress.reduced = not progress.reduced, None, True
        # A reduction in place holds nothing but the sums, so any number of them may be in flight.
        heavy = fill.transient or bucket.comm_hook.extra_bytes(fill.buffer) > 0
        while heavy and sum(flight.heavy for flight in self._flights) >= _IN_FLIGHT:
            self._land()
        self._flights.append(_Flight(bucket, fill, bucket.comm_hook.reduce(fill.buffer), first, heavy))

    def _land(self) -> None:
        """Wait for the oldest reduction and add its result to the sums."""
        # The oldest first, as it was started: a bucket that is reduced twice in a step replaces the sums and
        # then adds to them, never the other way round.
        flight = self._flights.popleft()
        flight.reduction.work.wait()
        self._take(flight.bucket, flight.reduction.result, first=flight.first)
        if flight.fill.transient:  # not before `_take`: the result may lie in it
            self._buffers.give_back(flight.fill.source)

    def _take(self, bucket: Bucket, result: Tensor, *, first: bool) -> None:
        self.store.accumulate(bucket, result, first=first)
        bucket.sums_scale = 1.0

    @torch.no_grad()
    def _sum_over_sequence(self) -> None:
        """Sum gradients that each tensor-parallel rank has for its part of the sequence only, in one call."""
        if self.context.tp.size == 1:
            return
        partial = [b for b in self._buckets() if any(s.partial_grad for s in b.layout.segments)]
        for loaded_buckets in self.store.stream((GRADIENT,), partial, changes=(GRADIENT,)):
            pieces = [
                loaded.flats[GRADIENT][loaded.bucket.layout.overlap(segment.start, segment.stop)]
                for loaded in loaded_buckets
                for segment in loaded.bucket.layout.segments
                if segment.partial_grad
            ]
            if parts := [piece for piece in pieces if piece.numel()]:
                together = on_device(torch.cat(parts), self.context.device)  # groups send from there
                self.context.tp.all_reduce(together).wait()
                for part, total in zip(parts, together.split([p.numel() for p in parts]), strict=True):
                    part.copy_(total)

    def _sum_over_ends(self) -> None:
        """Sum tied parameters' gradients over the pipeline stages that hold them."""
        for sharers in SHARERS:
            stages = self.context.groups[sharers]
            if stages.size == 1:
                continue
            # A tied parameter has its bucket to itself, so all stages cut it into the same slices.
            firsts = [(bucket, bucket.layout.specs[0]) for bucket in self._buckets()]
            shared = [bucket for bucket, spec in firsts if spec.shared and spec.sharers == sharers]
            for loaded_buckets in self.store.stream((GRADIENT,), shared, changes=(GRADIENT,)):
                for loaded in loaded_buckets:
                    sums = on_device(loaded.flats[GRADIENT], self.context.device)
                    stages.all_reduce(sums).wait()
                    if sums is not loaded.flats[GRADIENT]:
                        loaded.flats[GRADIENT].copy_(sums)

    def _buckets(self) -> list[Bucket]:
        return [progress.bucket for progress in self._progress]


@dataclass
class _BucketSums:
    """How far one bucket has got in this step.

    Attributes:
        fill: the buffer that its gradients arrive in; None if none has arrived since the last reduction.
        reduced: whether it has been reduced in this step, so that its sums are in flight or complete.
        missing: parameters whose gradients have not yet arrived in this micro-batch.
        early: parameters whose gradients an earlier backward of the same micro-batch brings.
        waiting: by parameter, gradients that have no buffer yet: a single one in its own dtype, or a sum over
            micro-batches.
    """

    bucket: Bucket
    fill: Fill | None = None
    reduced: bool = False
    missing: set[int] = field(default_factory=set)
    early: set[int] = field(default_factory=set)
    waiting: dict[int, Tensor] = field(default_factory=dict)

    @property
    def needs_buffer(self) -> bool:
        """Whether gradients need a transient buffer, because the sums are sharded or in flight."""
        return self.bucket.layout.row.shard_grads or self.reduced

    def start(self) -> None:
        self.fill, self.reduced = None, False
        self.early.clear()
        self.waiting.clear()

    def begin(self) -> None:
        self.missing = set(range(len(self.bucket.params))) - self.early

    @torch.no_grad()
    def wait(self, slot: int, grad: Tensor, dtype: torch.dtype) -> None:
        """Keep the gradient of parameter number `slot`; sums have `dtype`, as they would in a buffer."""
        held = self.waiting.get(slot)
        self.waiting[slot] = grad if held is None else held.to(dtype).add_(grad)


@dataclass(frozen=True)
class _Flight:
    """A reduction in flight.

    Attributes:
        bucket: the bucket that is reduced.
        fill: the buffer that the gradients arrived in.
        reduction: the sum in flight.
        first: whether it is the bucket's first of the step, which replaces the previous step's sums.
        heavy: whether it holds memory besides the sums.
    """

    bucket: Bucket
    fill: Fill
    reduction: Reduction
    first: bool
    heavy: bool


class _BufferPool:
    """Transient gradient buffers, all of one size so that any bucket can use any of them.

    A bucket of one parameter that exceeds the bucket size gets a buffer of its own size, which is not kept.
    When it is allocated, a kept buffer is dropped, so there are never more buffers than have been in use at
    once.

    Attributes:
        most_bytes: the most bytes that the buffers have held at a time.
    """

    def __init__(self, buckets: Sequence[Bucket], policy: ZeroPolicy):
        self._dtype = policy.dtypes.reduce
        layouts = [bucket.layout for bucket in buckets]
        usual = [x.padded for x in layouts if x.row.shard_grads and x.numel <= policy.bucket_size]
        self._size = max(usual, default=0)
        self._free: list[Tensor] = []
        self._held = self.most_bytes = 0

    def take(self, bucket: Bucket) -> Tensor:
        """An uninitialized flat buffer at least as long as the bucket."""
        large = bucket.layout.padded > self._size
        if self._free:
            kept = self._free.pop()
            if not large:
                return kept
            self._held -= kept.nbytes
            del kept
        made = bucket.full.new_empty(bucket.layout.padded if large else self._size, dtype=self._dtype)
        self._held += made.nbytes
        self.most_bytes = max(self.most_bytes, self._held)
        return made

    def give_back(self, buffer: Tensor) -> None:
        """Take back a buffer whose contents are no longer needed."""
        if buffer.numel() == self._size:
            self._free.append(buffer)
        else:
            self._held -= buffer.nbytes
