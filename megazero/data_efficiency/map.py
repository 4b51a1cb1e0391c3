"""The map half of an analysis: measures all samples, chunk by chunk, in any number of processes.

A chunk is a range of consecutive samples. Its values have a file of their own, which is whole or absent. So
an analysis that was stopped continues with the missing chunks, on any number of processes and machines that
share the folder. The folder's name contains a hash of everything that the values depend on, so chunks of
other data or settings are never used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.data.blended import SampleDataset
from megazero.data.cache import cache_key
from megazero.data.files import whole_file
from megazero.data_efficiency.analyzed import AnalyzedDataset
from megazero.data_efficiency.disk import disk
from megazero.data_efficiency.metrics import SampleMetric, Samples
from megazero.data_efficiency.tasks import run_tasks
from megazero.data_efficiency.user_metric import added, measured
from megazero.errors import DataError
from megazero.regular_file import open_regular

_BATCH = 128  # samples measured at once; with a few hundred tokens each, their arrays fit the CPU's cache
_CHUNKS, _MIN_CHUNK, _MAX_CHUNK = 256, 1 << 10, 1 << 16


@dataclass(frozen=True)
class ChunkGrid:
    """Samples 0..samples-1 in chunks of `size`; the last chunk may be shorter."""

    samples: int
    size: int

    @classmethod
    def of(cls, samples: int) -> ChunkGrid:
        """A grid of up to 256 chunks of 1,024 to 65,536 samples, or of more chunks of 65,536 samples.

        It depends on the number of samples alone, so that all workers use the same chunks. Raises DataError
        if there are no samples.
        """
        if samples < 1:
            raise DataError(f"`samples` to analyze must be at least 1, but are {samples}; give a dataset.")
        return cls(samples, min(_MAX_CHUNK, max(_MIN_CHUNK, -(-samples // _CHUNKS))))

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __getitem__(self, number: int) -> range:
        """The samples of chunk `number`."""
        if not 0 <= number < len(self):
            raise IndexError(f"`chunk` must be in 0..{len(self) - 1}, but is {number}.")
        return range(number * self.size, min((number + 1) * self.size, self.samples))


def even_part(whole: range, number: int, parts: int) -> range:
    """Part `number` of a range in `parts` parts, whose sizes differ by at most 1; a part may be empty."""
    return whole[len(whole) * number // parts : len(whole) * (number + 1) // parts]


@dataclass(frozen=True)
class MetricFolder:
    """The files of one metric of one dataset.

    save: the folder of the whole analysis. name: of the metric. accumulates: whether the values of a chunk
    are one vector, summed over its samples. identity: everything that the values depend on, as JSON.
    """

    save: Path
    name: str
    accumulates: bool
    grid: ChunkGrid
    identity: Mapping[str, object]

    @classmethod
    def of(
        cls, save: str | Path, metric: SampleMetric, dataset: AnalyzedDataset, grid: ChunkGrid
    ) -> MetricFolder:
        """The files of a metric of a dataset."""
        identity = {
            "dataset": dataset.key,
            "samples": dataset.samples,
            "chunk": grid.size,
            **metric.identity,
        }
        return cls(Path(save), metric.name, metric.accumulates, grid, identity)

    @property
    def results(self) -> Path:
        """The folder of the metric's results."""
        return self.save / self.name

    @property
    def chunks(self) -> Path:
        """The folder of the chunks, until they are reduced."""
        return self.results / f"map-{cache_key(self.identity)}"

    def path(self, chunk: int) -> Path:
        """The file of a chunk."""
        return self.chunks / f"{chunk:08d}.npy"

    def missing(self, among: range) -> list[int]:
        """The chunks of `among` that have no file yet."""
        existing = {path.name for path in self.chunks.glob("*.npy")} if self.chunks.is_dir() else set()
        return [chunk for chunk in among if self.path(chunk).name not in existing]

    def write(self, chunk: int, values: np.ndarray) -> None:
        """Store the values of a chunk. Raises DataError if the disk refuses."""
        path = self.path(chunk)
        with disk(path), whole_file(path) as file:
            np.save(file, values, allow_pickle=False)

    def read(self, chunk: int) -> np.ndarray:
        """The values of a chunk, int64. Raises DataError if the file is missing or damaged."""
        path, expected = self.path(chunk), len(self.grid[chunk])
        try:
            with open_regular(path) as file:
                values: np.ndarray = np.load(file, allow_pickle=False)
        except FileNotFoundError:
            raise DataError(
                f"`{path}` must exist, but does not: samples {self.grid[chunk].start}.."
                f"{self.grid[chunk].stop - 1} are not measured yet; run the map task of every worker first."
            ) from None
        except MemoryError:  # not the fault of the file
            raise
        except Exception as error:
            # numpy parses a text header, in which foreign bytes can raise many kinds of errors.
            raise DataError(
                f"`{path}` must be a .npy file, but is not ({error}); delete it, map again."
            ) from error
        if values.dtype != np.int64 or values.ndim != 1 or (not self.accumulates and values.size != expected):
            raise DataError(
                f"`{path}` must hold {'a vector' if self.accumulates else expected} of int64, but holds "
                f"{list(values.shape)} of {values.dtype}; delete it and map again."
            )
        return values


@dataclass(frozen=True)
class MapJob:
    """The metrics to measure on a dataset, with their folders. source: opens the dataset; can be pickled."""

    source: Callable[[], SampleDataset]
    metrics: tuple[tuple[SampleMetric, MetricFolder], ...]

    @property
    def grid(self) -> ChunkGrid:
        return self.metrics[0][1].grid

    def missing(self, among: range) -> set[int]:
        """The chunks of `among` that lack the values of some metric."""
        return {chunk for _, folder in self.metrics for chunk in folder.missing(among)}


class ChunkMapper:
    """Measures chunks. A forked worker shares the open dataset; unpickling opens it again."""

    def __init__(self, job: MapJob, dataset: SampleDataset | None = None):
        self._job = job
        self._dataset = job.source() if dataset is None else dataset

    def __reduce__(self) -> tuple[type, tuple[MapJob]]:
        return type(self), (self._job,)

    def __call__(self, chunk: int) -> int:
        """Measure the missing metrics of a chunk and store their values; return its number of samples."""
        missing = [
            (metric, folder)
            for metric, folder in self._job.metrics
            if folder.missing(range(chunk, chunk + 1))
        ]
        samples = self._job.grid[chunk]
        totals: list[np.ndarray | None] = [None] * len(missing)
        values: list[list[np.ndarray]] = [[] for _ in missing]
        for begin in range(samples.start, samples.stop, _BATCH) if missing else ():
            index = np.arange(begin, min(begin + _BATCH, samples.stop))
            batch = Samples.of(index, self._dataset.batch(index))
            for k, (metric, _) in enumerate(missing):
                if metric.accumulates:
                    totals[k] = added(totals[k], measured(metric, batch), metric.name)
                else:
                    values[k].append(measured(metric, batch))
        for (_, folder), total, parts in zip(missing, totals, values, strict=True):
            folder.write(chunk, np.concatenate(parts) if total is None else total)
        return len(samples)


@dataclass(frozen=True)
class ChunkAssignment:
    """The part of the chunks that is mapped on this machine.

    workers: the number of machines; worker: the number of this machine. processes: the number of processes of
    a machine, each with its own part; only: the numbers of the processes to run, all if empty. Raises
    DataError for numbers out of range.
    """

    workers: int = 1
    worker: int = 0
    processes: int = 1
    only: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.workers:
            raise DataError(
                f"`--analyzing-worker-id` must be in 0..{self.workers - 1}, but is {self.worker}; it counts "
                "the machines from 0."
            )
        wrong = [number for number in self.only if not 0 <= number < self.processes]
        if wrong:
            raise DataError(
                f"`--analyzing-specific-threads` must be in 0..{self.processes - 1}, but names {wrong[0]}; "
                "give the number of threads of the run that is repeated."
            )

    def chunks(self, grid: ChunkGrid) -> list[int]:
        """The chunks of this machine's processes."""
        of_machine = even_part(range(len(grid)), self.worker, self.workers)
        numbers = sorted(set(self.only)) or range(self.processes)
        return [chunk for number in numbers for chunk in even_part(of_machine, number, self.processes)]


def run_map(job: MapJob, assignment: ChunkAssignment, dataset: SampleDataset | None = None) -> Iterator[int]:
    """Measure the missing chunks of an assignment; yield the number of finished samples after each chunk.

    The first number counts the samples of earlier runs. dataset: the result of `job.source`, if it is open
    already. Raises DataError if a metric fails, a worker dies or the disk refuses; finished chunks are kept.
    """
    grid, chunks = job.grid, assignment.chunks(job.grid)
    missing = job.missing(range(len(grid)))
    done = sum(len(grid[chunk]) for chunk in chunks if chunk not in missing)
    yield done
    missing_chunks = [chunk for chunk in chunks if chunk in missing]
    if not missing_chunks:
        return
    processes = len(set(assignment.only)) or assignment.processes
    for count in run_tasks(ChunkMapper(job, dataset), missing_chunks, processes):
        done += count
        yield done
