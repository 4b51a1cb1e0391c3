"""External sort of samples by value: sorted runs, then ranges of values.

Each chunk of values is sorted by itself, which makes a run. From a sparse sample of all runs, boundaries are
chosen that split the values into ranges with about equal numbers of samples. Each range is then gathered from
all runs, sorted and written to its place. Samples of equal value stay in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from megazero.data_efficiency.map import ChunkGrid
from megazero.data_efficiency.row_writer import neutral_dtype
from megazero.data_efficiency.tasks import run_tasks

_RANGE = 1 << 20  # about the samples of a range; each takes about 50 bytes while the range is sorted
_SAMPLED = 1 << 18  # values of all runs together from which boundaries are chosen
_LARGEST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class SortedSamples:
    """The files of sorted samples.

    samples: file of the sorted sample numbers, `dtype` [n]. pieces: files of (value, number of samples),
    int64 [d, 2], ascending over all pieces.
    """

    samples: Path
    dtype: np.dtype
    pieces: tuple[Path, ...]

    def counts(self) -> Iterator[np.ndarray]:
        """Read the (value, number of samples) of each piece, int64 [d, 2]."""
        for path in self.pieces:
            yield np.fromfile(path, dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class ExternalSort:
    """Sorts the samples of a grid.

    values: chunk -> its values, int64. scratch: an empty folder for runs, which take 12 bytes per sample.
    target: the file for the sorted sample numbers. processes: the number of processes that sort.
    """

    grid: ChunkGrid
    values: Callable[[int], np.ndarray]
    scratch: Path
    target: Path
    processes: int = 1
    dtype: np.dtype = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", neutral_dtype(0, self.grid.samples - 1))

    def run(self) -> Iterator[int]:
        """Sort; yield the samples of each step, every sample in two steps. OSError if the disk refuses."""
        chunks = range(len(self.grid))
        yield from run_tasks(self.sort_chunk, chunks, self.processes)
        boundaries = self._boundaries()
        starts = np.zeros(len(boundaries), dtype=np.int64)
        for chunk in chunks:
            starts += np.searchsorted(self._run(chunk)[0], boundaries)
        with open(self.target, "wb") as file:
            file.truncate(self.grid.samples * self.dtype.itemsize)
        work = partial(self.write_range, boundaries, starts)
        yield from run_tasks(work, range(len(starts)), self.processes)

    def result(self) -> SortedSamples:
        """The files that `run` made."""
        pieces = sorted(self.scratch.glob("piece-*"))
        return SortedSamples(self.target, self.dtype, tuple(pieces))

    def sort_chunk(self, chunk: int) -> int:
        """Write the run of a chunk: its sorted values, and their places in the chunk."""
        values = self.values(chunk)
        order = np.argsort(values, kind="stable")
        values[order].tofile(self._path("values", chunk))
        order.astype(np.uint32).tofile(self._path("order", chunk))
        return values.size

    def write_range(self, boundaries: np.ndarray, starts: np.ndarray, number: int) -> int:
        """Write the samples of range `number` to their place, and its distinct values with counts.

        boundaries: int64 [ranges], the first value of each range; starts: int64 [ranges], the number of
        samples before each range.
        """
        last_range = number + 1 == len(boundaries)
        is_one_value = not last_range and int(boundaries[number + 1]) - int(boundaries[number]) == 1
        written = 0
        with open(self.target, "r+b") as file:
            file.seek(int(starts[number]) * self.dtype.itemsize)
            if is_one_value:
                # One value may have any number of samples, which are in order already.
                for _, samples in self._of_range(boundaries, number):
                    file.write(samples.tobytes())
                    written += samples.size
                counts = np.array([[boundaries[number], written]], dtype=np.int64)
            else:
                parts = list(self._of_range(boundaries, number))
                values = np.concatenate([value for value, _ in parts])
                samples = np.concatenate([sample for _, sample in parts])
                file.write(samples[np.argsort(values, kind="stable")].tobytes())
                written = values.size
                counts = np.stack(np.unique(values, return_counts=True), axis=1)
        if written:
            counts.tofile(self._path("piece", number))
        return written

    def _of_range(self, boundaries: np.ndarray, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The values of range `number` and their samples, run by run."""
        for chunk in range(len(self.grid)):
            run, order = self._run(chunk)
            begin = np.searchsorted(run, boundaries[number])
            last = number + 1 == len(boundaries)
            end = run.size if last else np.searchsorted(run, boundaries[number + 1])
            first = self.dtype.type(self.grid[chunk].start)
            yield np.array(run[begin:end]), order[begin:end].astype(self.dtype) + first

    def _boundaries(self) -> np.ndarray:
        """The first value of each range, int64, ascending; the first is the least value of all."""
        step = max(1, self.grid.samples // _SAMPLED)
        runs = (self._run(chunk)[0] for chunk in range(len(self.grid)))
        sampled = np.sort(np.concatenate([np.array(run[::step]) for run in runs]))
        picked = sampled[:: max(1, sampled.size * _RANGE // self.grid.samples)]
        # A value that is picked twice fills a range by itself, so the next value begins another range.
        heavy = np.unique(picked[1:][picked[1:] == picked[:-1]])
        return np.unique(np.concatenate([picked, heavy[heavy < _LARGEST] + 1]))

    def _run(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory-mapped run of a chunk: its sorted values, and their places in the chunk."""
        values = np.memmap(self._path("values", chunk), np.int64, mode="r")
        return values, np.memmap(self._path("order", chunk), np.uint32, mode="r")

    def _path(self, kind: str, number: int) -> Path:
        return self.scratch / f"{kind}-{number:08d}"
