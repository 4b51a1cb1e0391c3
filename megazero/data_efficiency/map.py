"""The first half of an analysis: metrics of all samples, chunk by chunk, by any number of processes.

A chunk is a run of consecutive sample numbers. Its values are a file of their own, which appears whole, so an
analysis that was stopped goes on with the chunks that are missing, on any number of processes and machines
that share the folder. The folder's name contains the hash of everything that the values depend on, so chunks
of other data or settings are never taken for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.data.blended import SampleDataset
from megazero.data.cache import cache_key
from megazero.data.files import whole_file
from megazero.data_efficiency.analyzed import AnalyzedDataset
from megazero.data_efficiency.disk import disk
from megazero.data_efficiency.metrics import Metric
from megazero.data_efficiency.samples import Samples
from megazero.data_efficiency.tasks import run_tasks
from megazero.data_efficiency.user_metric import added, measured
from megazero.errors import DataError
from megazero.regular_file import open_regular

_BATCH = 128  # samples measured at once: with some hundred tokens each, their arrays stay in the cache
_MOST, _CHUNKS, _LEAST = 1 << 16, 256, 1 << 10


@dataclass(frozen=True)
class ChunkGrid:
    """Samples 0..samples-1 cut into chunks of `size`; the last may be shorter."""

    samples: int
    size: int

    @classmethod
    def of(cls, samples: int) -> ChunkGrid:
        """Some hundred chunks, or more of 65,536 samples; it does not depend on who computes them. Raises
        DataError if there are no samples."""
        if samples < 1:
            raise DataError(f"`samples` to analyze must be at least 1, but are {samples}; give a dataset.")
        return cls(samples, min(_MOST, max(_LEAST, -(-samples // _CHUNKS))))

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __getitem__(self, number: int) -> range:
        """The samples of a chunk."""
        if not 0 <= number < len(self):
            raise IndexError(f"`chunk` must be in 0..{len(self) - 1}, but is {number}.")
        return range(number * self.size, min((number + 1) * self.size, self.samples))


def part_of(whole: range, number: int, parts: int) -> range:
    """Part `number` of a range cut into `parts`, whose sizes differ by one at most; some may be empty."""
    return whole[len(whole) * number // parts : len(whole) * (number + 1) // parts]


@dataclass(frozen=True)
class MetricFolder:
    """The place of the chunks of one metric of one dataset.

    save: the folder of the whole analysis. name: of the metric. accumulates: whether a chunk is one vector.
    grid: the chunks. identity: everything that values depend on, as JSON.
    """

    save: Path
    name: str
    accumulates: bool
    grid: ChunkGrid
    identity: Mapping[str, object]

    @classmethod
    def of(cls, save: str | Path, metric: Metric, dataset: AnalyzedDataset, grid: ChunkGrid) -> MetricFolder:
        """The folder of a metric of a dataset."""
        identity = {
            "dataset": dataset.key,
            "samples": dataset.samples,
            "chunk": grid.size,
            **metric.identity,
        }
        return cls(Path(save), metric.name, metric.accumulates, grid, identity)

    @property
    def home(self) -> Path:
        """The folder of the metric's results."""
        return self.save / self.name

    @property
    def chunks(self) -> Path:
        """The folder of the chunks until they are reduced."""
        return self.home / f"map-{cache_key(self.identity)}"

    def path(self, chunk: int) -> Path:
        """The file of a chunk."""
        return self.chunks / f"{chunk:08d}.npy"

    def missing(self, among: range) -> list[int]:
        """The chunks that have no file yet."""
        there = {path.name for path in self.chunks.glob("*.npy")} if self.chunks.is_dir() else set()
        return [chunk for chunk in among if self.path(chunk).name not in there]

    def write(self, chunk: int, values: np.ndarray) -> None:
        """Store a chunk's values. DataError if the disk refuses."""
        path = self.path(chunk)
        with disk(path), whole_file(path) as file:
            np.save(file, values, allow_pickle=False)

    def read(self, chunk: int) -> np.ndarray:
        """A chunk's values, int64. Raises DataError if the file is missing, damaged or of another length."""
        path, expected = self.path(chunk), len(self.grid[chunk])
        try:
            with open_regular(path) as file:
                values: np.ndarray = np.load(file, allow_pickle=False)
        except FileNotFoundError:
            raise DataError(
                f"`{path}` must exist, but does not: samples {self.grid[chunk].start}.."
                f"{self.grid[chunk].stop - 1} are not measured yet; run the map task of every worker first."
            ) from None
        except MemoryError:  # which says nothing of the file
            raise
        except Exception as error:
            # numpy parses a text header: foreign bytes can trip it in many ways, all of which mean the same.
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
    """A measurement. source: opens the dataset, and can be pickled. pairs: metrics and their folders."""

    source: Callable[[], SampleDataset]
    pairs: tuple[tuple[Metric, MetricFolder], ...]

    @property
    def grid(self) -> ChunkGrid:
        return self.pairs[0][1].grid

    def missing(self, among: range) -> list[int]:
        """The chunks that some metric has no values of yet."""
        missing: set[int] = set()
        for _, folder in self.pairs:
            missing.update(folder.missing(among))
        return sorted(missing)


class ChunkMapper:
    """Measures chunks. Forked workers share the open dataset; others open it again when this is unpickled."""

    def __init__(self, job: MapJob, dataset: SampleDataset | None = None):
        self._job = job
        self._dataset = job.source() if dataset is None else dataset

    def __reduce__(self) -> tuple[type, tuple[MapJob]]:
        return type(self), (self._job,)

    def __call__(self, chunk: int) -> int:
        """Measure a chunk and store what was missing; returns how many samples it has."""
        wanted = [
            (metric, folder) for metric, folder in self._job.pairs if folder.missing(range(chunk, chunk + 1))
        ]
        samples = self._job.grid[chunk]
        totals: list[np.ndarray | None] = [None] * len(wanted)
        values: list[list[np.ndarray]] = [[] for _ in wanted]
        for begin in range(samples.start, samples.stop, _BATCH) if wanted else ():
            index = np.arange(begin, min(begin + _BATCH, samples.stop))
            batch = Samples.of(index, self._dataset.batch(index))
            for k, (metric, _) in enumerate(wanted):
                if metric.accumulates:
                    totals[k] = added(totals[k], measured(metric, batch), metric.name)
                else:
                    values[k].append(measured(metric, batch))
        for (_, folder), total, parts in zip(wanted, totals, values, strict=True):
            folder.write(chunk, np.concatenate(parts) if total is None else total)
        return len(samples)


@dataclass(frozen=True)
class Share:
    """The part of the chunks to map here.

    workers, worker: machines, and which this one is. processes: of this machine, each with a part of its
    own. only: the numbers of the processes to run, all if empty. Raises DataError for numbers out of range.
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
        """The chunks of this share."""
        mine = part_of(range(len(grid)), self.worker, self.workers)
        numbers = sorted(set(self.only)) or range(self.processes)
        return [chunk for number in numbers for chunk in part_of(mine, number, self.processes)]


def run_map(job: MapJob, share: Share, dataset: SampleDataset | None = None) -> Iterator[int]:
    """Measure the chunks of a share that are missing, and yield how many samples are done, as it goes.

    The first number counts what earlier runs did. dataset: what `job.source` gives, if it is open already.
    Raises DataError if a metric fails, a worker dies or the disk refuses; finished chunks stay.
    """
    grid, chunks = job.grid, share.chunks(job.grid)
    missing = set(job.missing(range(len(grid)))) & set(chunks)
    done = sum(len(grid[chunk]) for chunk in chunks if chunk not in missing)
    yield done
    if not missing:
        return
    processes = len(set(share.only)) or share.processes
    for count in run_tasks(ChunkMapper(job, dataset), _dealt(missing, chunks), processes):
        done += count
        yield done


def _dealt(missing: set[int], chunks: Sequence[int]) -> list[int]:
    """The missing chunks in the order of the share."""
    return [chunk for chunk in chunks if chunk in missing]
