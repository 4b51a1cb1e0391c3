"""The second half of an analysis: from the values of all samples to the files that a curriculum reads.

They are DeepSpeed's: `{metric}_sample_to_metric`, `_index_to_metric`, `_index_to_sample`,
`_index_to_sample_percentile_merged`, or `_metric_value` for what accumulates. Beside them lies
`{metric}_dataset.json`, which says what dataset the sample numbers are of.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from megazero.data.files import flush
from megazero.data_efficiency.analyzed import AnalyzedDataset, facts_path
from megazero.data_efficiency.disk import whole_folder
from megazero.data_efficiency.map import MetricFolder
from megazero.data_efficiency.row_file import RowFile
from megazero.data_efficiency.row_writer import RowIndexWriter, neutral_dtype, write_rows
from megazero.data_efficiency.sorting import ExternalSort, SortedSamples
from megazero.data_efficiency.user_metric import added
from megazero.errors import DataError
from megazero.regular_file import read_regular

_PERCENTILES = 100
ROWS, VALUES, MERGED = "index_to_sample", "index_to_metric", "index_to_sample_percentile_merged"


def reduce_metric(folder: MetricFolder, dataset: AnalyzedDataset, processes: int = 1) -> Iterator[int]:
    """Make a metric's files from its chunks, and yield how much is done, up to `reduce_steps`, as it goes.

    The files appear together in `folder.home`, replacing those of an earlier analysis; the chunks are removed
    afterwards. Memory does not grow with the number of samples. Raises DataError if chunks are missing or
    damaged, or if the disk refuses; then there are no new files.
    """
    missing = folder.missing(range(len(folder.grid)))
    if missing:
        first = folder.grid[missing[0]]
        raise DataError(
            f"`{folder.home}` must have the values of all {folder.grid.samples} samples, but "
            f"{sum(len(folder.grid[chunk]) for chunk in missing)} are missing, the first are "
            f"{first.start}..{first.stop - 1}; run the map task of every worker, with the same flags."
        )
    with whole_folder(folder.home) as scratch:
        if folder.accumulates:
            yield from _write_sum(folder, scratch)
        else:
            yield from _write_order(folder, scratch, processes)
        with open(facts_path(scratch / folder.name), "wb") as file:
            file.write(dataset.to_json(metric=folder.identity).encode())
            flush(file)
    shutil.rmtree(folder.chunks, ignore_errors=True)


def is_reduced(folder: MetricFolder) -> bool:
    """Whether the metric's files are there, whole, and of the same data and settings."""
    prefix = folder.home / folder.name
    kinds = ("metric_value",) if folder.accumulates else (ROWS, VALUES, "sample_to_metric", MERGED)
    try:
        said = json.loads(read_regular(facts_path(prefix)))["metric"]
        for kind in kinds:
            RowFile(f"{prefix}_{kind}")
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return False  # missing or damaged, so it is to be made again
    return bool(said == folder.identity)


def reduce_steps(folder: MetricFolder) -> int:
    """The last number that `reduce_metric` yields."""
    return folder.grid.samples * (1 if folder.accumulates else 2)


def _write_sum(folder: MetricFolder, scratch: Path) -> Iterator[int]:
    total: np.ndarray | None = None
    done = 0
    for chunk in range(len(folder.grid)):
        total = added(total, folder.read(chunk), folder.name)
        done += len(folder.grid[chunk])
        yield done
    assert total is not None, "a grid has a chunk"
    dtype = neutral_dtype(int(total.min()), int(total.max()))
    write_rows(_named(scratch, folder, "metric_value"), dtype, [(total, np.array([total.size]))])


def _write_order(folder: MetricFolder, scratch: Path, processes: int) -> Iterator[int]:
    runs = scratch / "runs"
    runs.mkdir()
    prefix = _named(scratch, folder, ROWS)
    sort = ExternalSort(folder.grid, folder.read, runs, Path(f"{prefix}.bin"), processes)
    done = 0
    for count in sort.run():
        done += count
        yield done
    order = sort.result()
    low, high, distinct = _extent(order)
    values = neutral_dtype(low, high)
    write_rows(_named(scratch, folder, VALUES), values, _one_each(c[:, 0] for c in order.counts()))
    write_rows(_named(scratch, folder, "sample_to_metric"), values, _one_each(_in_order(folder)))
    _write_index(prefix, order, 1)
    merged = _named(scratch, folder, MERGED)
    shutil.copyfile(f"{prefix}.bin", f"{merged}.bin")
    _write_index(merged, order, max(1, distinct // _PERCENTILES))
    for path in (f"{prefix}.bin", f"{merged}.bin"):
        with open(path, "r+b") as file:
            flush(file)


def _named(scratch: Path, folder: MetricFolder, kind: str) -> Path:
    return scratch / f"{folder.name}_{kind}"


def _extent(order: SortedSamples) -> tuple[int, int, int]:
    """(least value, greatest value, number of distinct values)."""
    lows, high, distinct = [], 0, 0
    for counts in order.counts():
        lows.append(int(counts[0, 0]))
        high = int(counts[-1, 0])
        distinct += len(counts)
    return lows[0], high, distinct


def _in_order(folder: MetricFolder) -> Iterator[np.ndarray]:
    """The values of all samples in the order of their numbers."""
    for chunk in range(len(folder.grid)):
        yield folder.read(chunk)


def _one_each(blocks: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of rows of one element."""
    for block in blocks:
        yield block, np.ones(block.size, dtype=np.int32)


def _write_index(prefix: Path, order: SortedSamples, step: int) -> None:
    """The `.idx` of the sorted samples, with a row for every `step` distinct values."""
    writer = RowIndexWriter(prefix, order.dtype)
    held = np.empty(0, dtype=np.int64)
    for counts in order.counts():
        held = np.concatenate([held, counts[:, 1]])
        whole = held.size - held.size % step
        if whole:
            writer.add(held[:whole].reshape(-1, step).sum(axis=1))
            held = held[whole:]
    if held.size:
        writer.add(held.sum(keepdims=True))
    writer.close()
