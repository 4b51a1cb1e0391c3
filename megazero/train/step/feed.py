"""From a dataset to micro-batches on the device, read ahead by a background thread."""

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
from megazero.data.sources import changed_files
from megazero.models.batch import Collate, M, M_co, MicroBatch, SampleIndex
from megazero.mpu.threads import helper_pool


class Sampler(Protocol):
    """Decides which samples are whose: a function of the samples consumed, which threads may call at once."""

    spec: SamplerSpec

    def at(self, consumed_samples: int) -> np.ndarray:
        """Sample numbers of this rank's micro-batch after so many samples of all replicas, int64."""


if TYPE_CHECKING:
    from megazero.data_efficiency.sampler import CurriculumSampler

    _: tuple[type[Sampler], ...] = (BatchSampler, CurriculumSampler)


class SampleFacts(TypedDict):
    """A sample: its place in the training order, its number, and the place of its text in a file."""

    place: int
    sample: int
    text: str


@dataclass(frozen=True)
class Feed(Generic[M_co]):
    """This rank's micro-batches of one dataset, a function of the samples consumed so far.

    Attributes:
        dataset: gives stacked arrays for a list of sample numbers.
        sampler: decides which samples are this rank's.
        collate: turns arrays into the model's input.
        reader: reads micro-batches ahead; None reads them when they are needed.
    """

    dataset: SampleDataset
    sampler: Sampler
    collate: Collate[M_co]
    reader: ReadAhead | None = None

    @property
    def spec(self) -> SamplerSpec:
        """The fixed facts of the sampler."""
        return self.sampler.spec

    def of_step(self, step: Step) -> list[M_co]:
        """This rank's micro-batches of a training step. Raises DataError as `micro_batches` does."""
        return self.micro_batches(step.before.samples, step.micro_batches, step.sequence_length, step.rows)

    def of_replica(self, number: int) -> Feed[M_co]:
        """The same feed for another replica of the data, which reads when it is asked."""
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
        """The `count` micro-batches of the step that starts after `consumed_samples`.

        Args:
            consumed_samples: samples of all replicas before.
            count: micro-batches of each replica.
            length: tokens that each sample is cut to; None leaves it whole.
            rows: rows of this length that each sample gives, its first `rows` x `length` tokens.

        Raises:
            DataError: the dataset is too short, or holds a token outside the vocabulary.
        """
        starts = [consumed_samples + i * self.spec.stride for i in range(count)]
        read = self._read if self.reader is None else self.reader.take
        batches = [self.collate(*cut(read(start), self._samples(start), length, rows)) for start in starts]
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


def cut(
    arrays: dict[str, np.ndarray], samples: tuple[int, ...], length: int | None, rows: int = 1
) -> tuple[dict[str, np.ndarray], tuple[SampleIndex, ...]]:
    """Cut arrays of b samples into b x `rows` rows of `length` tokens, and give the places of these rows.

    Row j of a sample has its columns from j x `length` on; the rows of one sample follow each other. Arrays
    [b, s] are cut, and values that a sample has once are repeated for each row. In a row that begins within a
    document, positions count from the beginning of the row.

    Args:
        arrays: [b, s] or [b], a dataset's.
        samples: the positions of the b samples in the training order.
        length: tokens of a row; None leaves samples whole.
        rows: rows of a sample.
    """
    if length is None:
        return arrays, samples
    if rows == 1:  # of arrays that are narrower, such as short texts to classify, all columns
        cut_arrays = {n: np.ascontiguousarray(a[:, :length]) if a.ndim == 2 else a for n, a in arrays.items()}
        return cut_arrays, samples

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
    """Reads micro-batches before they are asked for, at most `ahead` of them.

    An error while reading is raised when its micro-batch is taken; a micro-batch that is never taken was past
    the end of the training, and its error does not matter.
    """

    def __init__(self, read: Callable[[int], dict[str, np.ndarray]], ahead: int):
        self._read = read
        self._ahead = ahead
        self._pending: dict[int, Future[dict[str, np.ndarray]]] = {}
        self._executor = helper_pool(1, "read-ahead")

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


def make_feed(dataset: SampleDataset, sampler: Sampler, collate: Collate[M], ahead: int) -> Feed[M]:
    """A feed that reads `ahead` micro-batches in the background; with 0 it reads them when needed."""
    feed = Feed(dataset, sampler, collate)
    return replace(feed, reader=ReadAhead(feed._read, ahead)) if ahead else feed


@dataclass(frozen=True)
class Feeds:
    """The sources of samples; a split without data is None."""

    train: Feed[MicroBatch] | None
    valid: Feed[MicroBatch] | None
    test: Feed[MicroBatch] | None

    @property
    def datasets(self) -> list[SampleDataset | None]:
        """The datasets of training, validation and test."""
        return [None if feed is None else feed.dataset for feed in (self.train, self.valid, self.test)]

    def changed_files(self) -> list[str]:
        """Clauses about the files of all splits that have changed, as this rank sees them."""
        datasets = (dataset for dataset in self.datasets if dataset is not None)
        return list(dict.fromkeys(clause for dataset in datasets for clause in changed_files(dataset)))
