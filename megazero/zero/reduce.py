"""Gradient sums: over micro-batches, and over the ranks that hold the same parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megazero.mpu import ParallelContext, Work
from megazero.zero.bucket import Bucket
from megazero.zero.policy import ZeroPolicy

# Buffers that reductions under way may hold besides the sums, while the next bucket fills.
_IN_FLIGHT = 1


class GradientReducer:
    """Collects each parameter's gradient as backward produces it and reduces whole buckets.

    Use: `start`; then `begin`, one backward and `end` per chunk and micro-batch; `finish` returns when
    `Bucket.grads` hold the sums over the whole global batch.

    Gradients that are whole on each rank are summed over the micro-batches in place and reduced once. Where
    they are sharded, each backward fills a transient buffer that is reduced and added to the shard. Within a
    chunk reductions start in bucket order alone, so that every rank makes the same calls in whatever order
    its autograd runs.

    Args:
        buckets: those of the trainable parameters, in the order in which backward completes them.
        policy: overlap and dtypes.
        context: for the sums over tensor-parallel ranks and tied parameters.
    """

    def __init__(self, buckets: Sequence[Bucket], policy: ZeroPolicy, context: ParallelContext):
        self.context = context
        self.policy = policy
        self._progress = [_Progress(bucket) for bucket in buckets]
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
        self._next = 0

    def start(self) -> None:
        """Forget the previous step's gradients."""
        for progress in self._progress:
            progress.fill = None
            progress.reduced = False
        self._flights.clear()
        self._owed = set(self._chunks)
        self._current = None

    def begin(self, chunk: int, *, reduce: bool) -> None:
        """The next backward is `chunk`'s; with `reduce`, what it completes is reduced."""
        assert self._current is None, f"the backward of chunk {self._current} has not ended"
        self._current, self._reduce, self._next = chunk, reduce, 0
        for progress in self._of(chunk):
            progress.begin()

    def collect(self, param: nn.Parameter) -> None:
        """Take `param.grad` over."""
        progress, slot = self._place[id(param)]
        assert self._current is not None, f"{progress.bucket.specs[slot].name}: a gradient outside a backward"
        self._open(progress).add(slot, param.grad)
        param.grad = None
        if progress.bucket.key.chunk != self._current:  # one parameter that two chunks on this rank use
            return
        progress.missing.discard(slot)
        if self._reduce and self.policy.overlap_reduce:
            self._launch_complete()

    def end(self) -> None:
        """The chunk's backward is over; start the reductions that have not been."""
        chunk = self._current
        assert chunk is not None, "no backward has begun"
        if self._reduce:
            self._launch_all(chunk)
        else:
            self._owed.add(chunk)
        self._current = None

    def finish(self) -> None:
        """Return when the step's sums are complete."""
        assert self._current is None, f"the backward of chunk {self._current} has not ended"
        for chunk in self._chunks:
            # All of a chunk that has not been reduced; else what came late, from another chunk's backward.
            self._next = 0 if chunk in self._owed else len(self._of(chunk))
            self._launch_all(chunk)
        while self._flights:
            self._land()
        self._sum_over_sequence()
        self._sum_over_ends()

    def _of(self, chunk: int) -> list[_Progress]:
        return self._chunks.get(chunk, [])

    def _open(self, progress: _Progress) -> _Fill:
        """The buffer that the bucket's gradients go to now."""
        if progress.fill is None:
            bucket = progress.bucket
            accumulates = not (bucket.row.shard_grads or progress.reduced)
            progress.fill = _Fill(bucket, bucket.grads if accumulates else self._buffers.take(bucket))
        return progress.fill

    def _launch_complete(self) -> None:
        chunk = self._of(self._current)
        while self._next < len(chunk) and not chunk[self._next].missing:
            self._launch(chunk[self._next])
            self._next += 1

    def _launch_all(self, chunk: int) -> None:
        for progress in self._of(chunk)[self._next :]:
            self._launch(progress)
        # What came after its bucket had been reduced (a module that two reentrant checkpoints use).
        for progress in self._of(chunk)[: self._next]:
            if progress.fill is not None:
                self._launch(progress)
        self._owed.discard(chunk)

    @torch.no_grad()
    def _launch(self, progress: _Progress) -> None:
        """Start the reduction of what the bucket's buffer holds; zeros where nothing has come."""
        bucket, fill = progress.bucket, self._open(progress)
        fill.complete()
        if bucket.group.size == 1:  # the sums are complete as they are, and more can be added
            return
        first, progress.fill, progress.reduced = not progress.reduced, None, True
        wire = fill.buffer.to(self.policy.reduce_dtype)
        heavy = wire is not fill.buffer or fill.source is not bucket.grads
        while heavy and sum(flight.heavy for flight in self._flights) >= _IN_FLIGHT:
            self._land()
        if bucket.row.shard_state:
            result = wire[bucket.own]
            work = bucket.group.reduce_scatter(result, wire, async_op=True)
        else:
            result = wire
            work = bucket.group.all_reduce(wire, async_op=True)
        self._flights.append(_Flight(bucket, fill.source, result, work, first, heavy))

    @torch.no_grad()
    def _land(self) -> None:
        """Wait for the oldest reduction and bring its result to the sums."""
        flight = self._flights.popleft()
        flight.work.wait()
        if flight.heavy:
            sums = flight.bucket.own_grads
            sums.copy_(flight.result) if flight.first else sums.add_(flight.result)
        if flight.source is not flight.bucket.grads:
            self._buffers.give_back(flight.source)

    @torch.no_grad()
    def _sum_over_sequence(self) -> None:
        """Sum what each tensor-parallel rank has of its part of the sequence alone, in one call."""
        if self.context.tp.size == 1:
            return
        parts = [
            piece
            for progress in self._progress
            for segment, piece in progress.bucket.pieces(progress.bucket.own_grads)
            if segment.partial_grad
        ]
        if not parts:
            return
        together = torch.cat(parts)
        self.context.tp.all_reduce(together).wait()
        for part, total in zip(parts, together.split([part.numel() for part in parts]), strict=True):
            part.copy_(total)

    def _sum_over_ends(self) -> None:
        """Sum tied parameters' gradients over the two pipeline stages that hold them."""
        if self.context.ends.size == 1:
            return
        for progress in self._progress:
            if progress.bucket.specs[0].shared:
                self.context.ends.all_reduce(progress.bucket.own_grads).wait()


class _Fill:
    """What a bucket's gradients arrive in: the first `padded` elements of `source`."""

    def __init__(self, bucket: Bucket, source: Tensor):
        self.source = source
        self.buffer = source[: bucket.padded]
        self._tail = source[bucket.numel : bucket.padded]
        self._views = bucket.views(source)
        self._written = [False] * len(bucket.params)

    def add(self, slot: int, grad: Tensor) -> None:
        """Add the gradient of parameter number `slot`."""
        if self._written[slot]:
            self._views[slot].add_(grad)
        else:
            self._views[slot].copy_(grad)
            self._written[slot] = True

    def complete(self) -> None:
        """Write zeros where nothing has arrived: the parameter may be in use on another rank."""
        self._tail.zero_()
        for view, written in zip(self._views, self._written, strict=True):
            if not written:
                view.zero_()
        self._written = [True] * len(self._views)


@dataclass
class _Progress:
    """How far one bucket is in this step.

    Attributes:
        fill: what its gradients arrive in; None where nothing has since the last reduction.
        reduced: whether it has been reduced in this step, so that `Bucket.grads` is under way or complete.
        missing: parameters whose gradients have not come in this backward.
    """

    bucket: Bucket
    fill: _Fill | None = None
    reduced: bool = False
    missing: set[int] = field(default_factory=set)

    def begin(self) -> None:
        self.missing = set(range(len(self.bucket.params)))


@dataclass(frozen=True)
class _Flight:
    """A reduction under way.

    Attributes:
        source: the buffer that the gradients came in: the bucket's sums or a transient one.
        result: where this rank's part of the sum comes to lie.
        first: whether it is the bucket's first of the step, and replaces the previous step's sums.
        heavy: whether it holds memory besides the sums.
    """

    bucket: Bucket
    source: Tensor
    result: Tensor
    work: Work
    first: bool
    heavy: bool


class _BufferPool:
    """Transient gradient buffers, of one size so that any bucket can use any of them.

    A bucket that is one parameter above the bucket size gets a buffer of its own size, which is not kept.
    """

    def __init__(self, buckets: Sequence[Bucket], policy: ZeroPolicy):
        self._dtype = policy.reduce_dtype
        usual = [b.padded for b in buckets if b.row.shard_grads and b.numel <= policy.bucket_size]
        self._size = max(usual, default=0)
        self._free: list[Tensor] = []

    def take(self, bucket: Bucket) -> Tensor:
        """An uninitialized flat buffer at least as long as the bucket."""
        if bucket.padded > self._size:
            return bucket.full.new_empty(bucket.padded, dtype=self._dtype)
        return self._free.pop() if self._free else bucket.full.new_empty(self._size, dtype=self._dtype)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back whose contents are no longer needed."""
        if buffer.numel() == self._size:
            self._free.append(buffer)
