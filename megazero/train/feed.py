"""From a dataset to micro-batches on the device, read ahead by a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megazero.data import SamplerSpec
from megazero.data.blended import SampleDataset

# From a micro-batch's arrays and the positions of its samples in the training order to the model's input.
Collate = Callable[[dict[str, np.ndarray], tuple[int, ...]], object]


class Sampler(Protocol):
    """Decides which samples are whose: a function of the samples consumed, which threads may call at once."""

    spec: SamplerSpec

    def at(self, consumed_samples: int) -> np.ndarray:
        """Sample numbers of this rank's micro-batch after so many samples of all replicas, int64."""


@dataclass(frozen=True)
class Feed:
    """This rank's micro-batches of one dataset, a function of the samples consumed so far.

    Attributes:
        dataset: gives stacked arrays for a list of sample numbers.
        sampler: decides which samples are this rank's.
        collate: turns arrays into the model's input.
        reader: reads micro-batches ahead; None reads them when they are needed.
    """

    dataset: SampleDataset
    sampler: Sampler
    collate: Collate
    reader: ReadAhead | None = None

    @property
    def spec(self) -> SamplerSpec:
        """The fixed facts of the sampler."""
        return self.sampler.spec

    def micro_batches(self, consumed_samples: int, count: int, length: int | None = None) -> list:
        """The `count` micro-batches of the step that starts after `consumed_samples`.

        Args:
            consumed_samples: samples of all replicas before.
            count: micro-batches of each replica.
            length: tokens that each sample is cut to; None leaves it whole.

        Raises:
            DataError: the dataset is too short, or holds a token outside the vocabulary.
        """
        starts = [consumed_samples + i * self.spec.stride for i in range(count)]
        read = self._read if self.reader is None else self.reader.take
        batches = [self.collate(_cut(read(start), length), self._samples(start)) for start in starts]
        if self.reader is not None:
            self.reader.expect(starts[-1] + self.spec.stride, self.spec.stride)
        return batches

    def close(self) -> None:
        """Stop reading ahead."""
        if self.reader is not None:
            self.reader.close()

    def _samples(self, start: int) -> tuple[int, ...]:
        first = start + self.spec.data_parallel_rank * self.spec.micro_batch_size
        return tuple(range(first, first + self.spec.micro_batch_size))

    def _read(self, start: int) -> dict[str, np.ndarray]:
        return self.dataset.batch(self.sampler.at(start))


def _cut(arrays: dict[str, np.ndarray], length: int | None) -> dict[str, np.ndarray]:
    """The first `length` columns of every array [b, s]."""
    if length is None:
        return arrays
    return {name: np.ascontiguousarray(a[:, :length]) if a.ndim == 2 else a for name, a in arrays.items()}


class ReadAhead:
    """Reads micro-batches before they are asked for, at most `ahead` of them.

    An error while reading is raised when its micro-batch is taken; a micro-batch that is never taken was past
    the end of the training, and its error does not matter.
    """

    def __init__(self, read: Callable[[int], dict[str, np.ndarray]], ahead: int):
        self._read = read
        self._ahead = ahead
        self._pending: dict[int, Future] = {}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")

    def take(self, start: int) -> dict[str, np.ndarray]:
        """The micro-batch at `start`, whether expected or not."""
        future = self._pending.pop(start, None)
        return self._read(start) if future is None else future.result()

    def expect(self, start: int, stride: int) -> None:
        """Start reading the micro-batches from `start` on."""
        wanted = [start + i * stride for i in range(self._ahead)]
        self._pending = {s: f for s, f in self._pending.items() if s in wanted}
        for s in wanted:
            if s not in self._pending:
                self._pending[s] = self._executor.submit(self._read, s)

    def close(self) -> None:
        """Stop reading."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def make_feed(dataset: SampleDataset, sampler: Sampler, collate: Collate, ahead: int) -> Feed:
    """A feed that reads `ahead` micro-batches in the background; with 0 it reads them when needed."""
    feed = Feed(dataset, sampler, collate)
    return replace(feed, reader=ReadAhead(feed._read, ahead)) if ahead else feed
