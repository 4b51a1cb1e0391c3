"""From a dataset to micro-batches on the device, with read-ahead by a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypedDict

import numpy as np

from megazero.config.steps import Step
from megazero.data.blended import SampleDataset, whereabouts
from megazero.data.sampler import BatchSampler, SamplerSpec
from megazero.data.sources import are_stored, changed_files
from megazero.models.batch import Collate, M, M_co, MicroBatch, SampleIndex
from megazero.mpu.threads import helper_pool

_AHEAD_IN_STORE, _THREADS_IN_STORE = 16, 8  # micro-batches


class Sampler(Protocol):
    """Assigns samples to ranks, as a function of the samples consumed; thread-safe."""

    spec: SamplerSpec

    def at(self, consumed_samples: int) -> np.ndarray:
        """Sample numbers, int64 [b], of this rank's micro-batch after `consumed_samples` of all replicas."""


if TYPE_CHECKING:
    from megazero.data_efficiency.sampler import CurriculumSampler

    _: tuple[type[Sampler], ...] = (BatchSampler, CurriculumSampler)


class SampleFacts(TypedDict):
    """A sample: its position in the training order, its number, and where its text is in which file."""

    place: int
    sample: int
    text: str


@dataclass(frozen=True)
class Feed(Generic[M_co]):
    """This rank's micro-batches of one dataset, a function of the samples consumed.

    Attributes:
        dataset: maps sample numbers to stacked arrays.
        sampler: decides which samples are this rank's.
        collate: turns arrays into micro-batches.
        reader: reads micro-batches ahead; None reads them on demand.
    """

    dataset: SampleDataset
    sampler: Sampler
    collate: Collate[M_co]
    reader: ReadAhead | None = None

    @property
    def spec(self) -> SamplerSpec:
        """The sampler's settings."""
        return self.sampler.spec

    def of_step(self, step: Step) -> list[M_co]:
        """This rank's micro-batches of a training step (see `micro_batches`)."""
        return self.micro_batches(step.before.samples, step.micro_batches, step.sequence_length, step.rows)

    def of_replica(self, number: int) -> Feed[M_co]:
        """The same feed for another data-parallel replica, without read-ahead."""
        sampler = copy(self.sampler)
        sampler.spec = replace(self.spec, data_parallel_rank=number)
        return Feed(self.dataset, sampler, self.collate)

    def samples_of(self, step: Step) -> list[SampleFacts]:
        """Describe this rank's samples of a step."""
        starts = [step.before.samples + i * self.spec.stride for i in range(step.micro_batches)]
        return [
            {"place": place, "sample": int(number), "text": whereabouts(self.dataset, int(number))}
            for start in starts
            for place, number in zip(self._samples(start), self.sampler.at(start), strict=True)
        ]

    def micro_batches(
        self, consumed_samples: int, count: int, length: int | None = None, rows: int = 1
    ) -> list[M_co]:
        """Read the `count` micro-batches of the step that starts after `consumed_samples`.

        Args:
            consumed_samples: samples of all replicas before.
            count: micro-batches of each replica.
            length: the length to which samples are cropped; None leaves them whole.
            rows: number of rows of this length that each sample is split into (see `crop`).

        Raises:
            DataError: the dataset is too short, or has a token outside the vocabulary.
        """
        starts = [consumed_samples + i * self.spec.stride for i in range(count)]
        read = self._read if self.reader is None else self.reader.take
        batches = [self.collate(*crop(read(start), self._samples(start), length, rows)) for start in starts]
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


def crop(
    arrays: dict[str, np.ndarray], samples: tuple[int, ...], length: int | None, rows: int = 1
) -> tuple[dict[str, np.ndarray], tuple[SampleIndex, ...]]:
    """Split b samples into b x `rows` rows of `length` tokens; return the arrays and each row's sample.

    Row j of a sample has its columns from j x `length` on; the rows of one sample are adjacent. Arrays [b, s]
    are split, arrays [b] are repeated for each row. In a row that begins within a document, positions count
    from the beginning of the row.

    Args:
        arrays: a dataset's arrays, [b, s] or [b].
        samples: the positions of the b samples in the training order.
        length: tokens of a row; None leaves samples whole.
        rows: rows of a sample.
    """
    if length is None:
        return arrays, samples
    if rows == 1:  # narrower arrays, such as short texts to classify, keep all columns
        cropped = {n: np.ascontiguousarray(a[:, :length]) if a.ndim == 2 else a for n, a in arrays.items()}
        return cropped, samples

    def of(name: str, array: np.ndarray) -> np.ndarray:
        if array.ndim != 2:
            return np.repeat(array, rows, axis=0)
        flat = np.ascontiguousarray(array[:, : rows * length]).reshape(-1, length)
        return np.minimum(flat, np.arange(length, dtype=flat.dtype)) if name == "position_ids" else flat

    places: list[SampleIndex] = [
        sample if row == 0 else (sample, row) for sample in samples for row in range(rows)
    ]
    return {name: of(name, array) for name, array in arrays.items()}, tuple(places)


class ReadAhead:
    """Reads up to `ahead` micro-batches in the background.

    An error while reading is raised when its micro-batch is taken. Micro-batches past the end of the training
    are never taken, so their errors do not matter. `threads` of them are read at the same time.
    """

    def __init__(self, read: Callable[[int], dict[str, np.ndarray]], ahead: int, threads: int = 1):
        self._read = read
        self._ahead = ahead
        self._pending: dict[int, Future[dict[str, np.ndarray]]] = {}
        self._executor = helper_pool(threads, "read-ahead")

    def take(self, start: int) -> dict[str, np.ndarray]:
        """Return the micro-batch at `start`; read it now if it was not expected."""
        future = self._pending.pop(start, None)
        return self._read(start) if future is None else future.result()

    def expect(self, start: int, stride: int) -> None:
        """Start reading the next micro-batches, from `start` on."""
        wanted = [start + i * stride for i in range(self._ahead)]
        self._pending = {s: f for s, f in self._pending.items() if s in wanted}
        for s in wanted:
            if s not in self._pending:
                self._pending[s] = self._executor.submit(self._read, s)

    def forget(self) -> None:
        """Drop what has been read ahead, after the order of the samples has changed."""
        self._pending = {}

    def close(self) -> None:
        """Stop reading."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def make_feed(dataset: SampleDataset, sampler: Sampler, collate: Collate[M], ahead: int) -> Feed[M]:
    """Make a feed that reads `ahead` micro-batches in the background; with 0 it reads on demand.

    Of datasets in a store it reads more, several at the same time, as each waits for the store.
    """
    feed, threads = Feed(dataset, sampler, collate), 1
    if ahead and are_stored(dataset):
        ahead, threads = max(ahead, _AHEAD_IN_STORE), _THREADS_IN_STORE
    return replace(feed, reader=ReadAhead(feed._read, ahead, threads)) if ahead else feed


@dataclass(frozen=True)
class Feeds:
    """The feeds of the three splits; None for a split without data."""

    train: Feed[MicroBatch] | None
    valid: Feed[MicroBatch] | None
    test: Feed[MicroBatch] | None

    @property
    def datasets(self) -> list[SampleDataset | None]:
        """The datasets of training, validation and test."""
        return [None if feed is None else feed.dataset for feed in (self.train, self.valid, self.test)]

    def changed_files(self) -> list[str]:
        """Descriptions of the files that have changed since the run began, as this rank sees them."""
        datasets = (dataset for dataset in self.datasets if dataset is not None)
        return list(dict.fromkeys(clause for dataset in datasets for clause in changed_files(dataset)))
