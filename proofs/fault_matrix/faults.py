"""Faults: each changes what one rank of a run computes, holds, sends or writes, at one moment.

They sit where the real ones would: around the optimizer of a rank, in its gradients, in its groups, in its
dataset, and on its disk.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.disk import Disk, File
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Work
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup
from megazero.train.step.engine import Engine
from megazero.zero.bucket import Bucket
from megazero.zero.store.store import WEIGHT

Spoil = Callable[[Engine], None]
"""Breaks something of one rank's engine before it trains."""


def _bucket_of(engine: Engine, name: str) -> tuple[Bucket, int]:
    """The bucket that holds the first parameter whose name contains `name`, and its number there."""
    for bucket in engine.optimizer.store.buckets:
        for number, spec in enumerate(bucket.layout.specs):
            if name in spec.name:
                return bucket, number
    raise LookupError(f"no parameter on this rank is called {name}")


def _flip(tensor: Tensor, element: int = 0) -> None:
    """Flip a high bit of the mantissa of one element."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.view(-1)[element : element + 1].view(kind)
    bits ^= 1 << (tensor.element_size() * 8 - 12)


@dataclass(frozen=True)
class AfterUpdate:
    """Does something to this rank's state right after one update, as a memory fault would.

    Attributes:
        update: the number of the update, from 1.
        what: changes the engine.
    """

    update: int
    what: Spoil

    def __call__(self, engine: Engine) -> None:
        honest = engine.optimizer.step

        def step(*args, **kwargs):
            report = honest(*args, **kwargs)
            if engine.optimizer.updates == self.update and not getattr(engine, "spoilt", False):
                engine.spoilt = True  # once, also if the run goes back and comes here again
                with torch.no_grad():
                    self.what(engine)
            return report

        engine.optimizer.step = step


@dataclass(frozen=True)
class FlippedBit:
    """A bit of a parameter or a moment flips.

    Attributes:
        name: part of the parameter's name.
        kind: ``in use``, ``weight`` (the master) or the name of a moment.
    """

    name: str
    kind: str

    def __call__(self, engine: Engine) -> None:
        bucket, number = _bucket_of(engine, self.name)
        if self.kind == "in use":
            sharded = bucket.layout.row.shard_params
            flat = bucket.store.shard(bucket) if sharded else bucket.full
        else:
            flat = engine.optimizer.store.at_rest(bucket)[self.kind]
        if flat.numel() == bucket.layout.padded:
            start, _ = bucket.layout.spans[number]
            _flip(flat[start:])
        else:
            _flip(next(piece for member, _, piece in bucket.layout.member_pieces(flat) if member == number))


@dataclass(frozen=True)
class Poisoned:
    """A weight or a moment becomes a number that is not finite."""

    name: str
    kind: str = WEIGHT
    value: float = float("nan")

    def __call__(self, engine: Engine) -> None:
        bucket, number = _bucket_of(engine, self.name)
        flat = engine.optimizer.store.at_rest(bucket)[self.kind]
        pieces = (piece for member, _, piece in bucket.layout.member_pieces(flat) if member == number)
        for piece in pieces:
            piece[0] = self.value


@dataclass(frozen=True)
class BadGradient:
    """A rank computes a wrong gradient of one parameter.

    Attributes:
        name: part of the parameter's name.
        backward: the first backward through it that goes wrong, from 1.
        times: how many do; None for all from then on.
        factor: what the gradient is multiplied with.
    """

    name: str
    backward: int
    times: int | None = 1
    factor: float = 2.0**20

    def __call__(self, engine: Engine) -> None:
        bucket, number = _bucket_of(engine, self.name)
        seen = 0

        def wrong(gradient: Tensor) -> Tensor:
            nonlocal seen
            seen += 1
            late = self.times is not None and seen >= self.backward + self.times
            return gradient if seen < self.backward or late else gradient * self.factor

        bucket.params[number].register_hook(wrong)


class FaultyGroup(WrappingGroup):
    """Changes what this rank brings to one collective, as a broken link or buffer would.

    Args:
        inner: communicates.
        operation: the method of `Group`.
        number: which call of it that carries at least `least` elements, from 1.
        change: changes a copy of what is brought.
        least: the fewest elements.
    """

    def __init__(self, inner, operation: str, number: int, change: Callable[[Tensor], None], least: int):
        super().__init__(inner)
        self._operation = operation
        self._left = number
        self._change = change
        self._least = least

    def _collective(self, call: GroupCall) -> Work:
        if call.operation == self._operation and call.given.numel() >= self._least:
            self._left -= 1
            if self._left == 0:
                self._change(call.given)
        return super()._collective(call)


def with_faulty_group(context: ParallelContext, axis: str, *args) -> ParallelContext:
    """The same context with a `FaultyGroup` on one axis."""
    from dataclasses import replace

    groups = dict(context.groups)
    faulty = FaultyGroup(groups[axis], *args)
    shared = groups[axis]
    return replace(context, groups={name: faulty if g is shared else g for name, g in groups.items()})


@dataclass(frozen=True)
class Slow:
    """A rank that takes longer for each step than the others, in seconds."""

    seconds: float

    def __call__(self, engine: Engine) -> None:
        honest = engine.executor.train

        def train(*args, **kwargs):
            time.sleep(self.seconds)
            return honest(*args, **kwargs)

        engine.executor.train = train


class FullDisk(Disk):
    """A disk that is full from one file on, for a while.

    Args:
        first: the number of the file that finds it full, from 1.
        count: how many files do.
    """

    def __init__(self, first: int, count: int):
        self._number = 0
        self._full = range(first, first + count)

    def create(self, path: Path) -> File:
        self._number += 1
        if self._number in self._full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().create(path)


class PoisonedSamples:
    """A dataset in which some samples are noise; it is otherwise the one around which it is.

    Args:
        inner: the dataset.
        numbers: the samples that are noise.
        vocabulary: number of tokens.
    """

    def __init__(self, inner, numbers: Sequence[int], vocabulary: int):
        self._inner = inner
        self._numbers = frozenset(numbers)
        self._vocabulary = vocabulary

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def batch(self, indices) -> dict[str, np.ndarray]:
        arrays = {name: array.copy() for name, array in self._inner.batch(indices).items()}
        for row, number in enumerate(np.asarray(indices).tolist()):
            if number in self._numbers:
                noise = np.random.Generator(np.random.Philox(key=number))
                for name in ("tokens", "labels"):
                    arrays[name][row] = noise.integers(0, self._vocabulary, arrays[name].shape[1])
        return arrays
