"""The reduce half of an analysis: from the values of all samples to the files that a curriculum reads.

The files are DeepSpeed's: `{metric}_sample_to_metric`, `_index_to_metric`, `_index_to_sample`,
`_index_to_sample_percentile_merged`, or `_metric_value` if the metric accumulates. megazero adds
`{metric}_dataset.json`, which describes the dataset that the sample numbers refer to.
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
    """Make the files of a metric from its chunks; yield the progress, up to `reduce_steps`.

    The files appear together in `folder.results` and replace those of an earlier analysis; then the chunks
    are removed. Memory does not grow with the number of samples. Raises DataError, and makes no files, if
    chunks are missing or damaged or if the disk refuses.
    """
    missing = folder.missing(range(len(folder.grid)))
    if missing:
        first = folder.grid[missing[0]]
        raise DataError(
            f"`{folder.results}` must have the values of all {folder.grid.samples} samples, but "
            f"{sum(len(folder.grid[chunk]) for chunk in missing)} are missing, the first are "
            f"{first.start}..{first.stop - 1}; run the map task of every worker, with the same flags."
        )
    with whole_folder(folder.results) as scratch:
        if folder.accumulates:
            yield from _write_sum(folder, scratch)
        else:
            yield from _write_order(folder, scratch, processes)
        with open(facts_path(scratch / folder.name), "wb") as file:
            file.write(dataset.to_json(metric=folder.identity).encode())
            flush(file)
    shutil.rmtree(folder.chunks, ignore_errors=True)


def is_reduced(folder: MetricFolder) -> bool:
    """Whether the files of the metric exist, whole, and of the same data and settings."""
    prefix = folder.results / folder.name
    kinds = ("metric_value",) if folder.accumulates else (ROWS, VALUES, "sample_to_metric", MERGED)
    try:
        recorded = json.loads(read_regular(facts_path(prefix)))["metric"]
        for kind in kinds:
            RowFile(f"{prefix}_{kind}")
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return False  # missing or damaged
    return bool(recorded == folder.identity)


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
    write_rows(_named(scratch, folder, VALUES), values, _rows_of_one(c[:, 0] for c in order.counts()))
    in_order = (folder.read(chunk) for chunk in range(len(folder.grid)))
    write_rows(_named(scratch, folder, "sample_to_metric"), values, _rows_of_one(in_order))
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


def _rows_of_one(blocks: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Make a row of each element: yield (elements, lengths of their rows) of each block."""
    for block in blocks:
        yield block, np.ones(block.size, dtype=np.int32)


def _write_index(prefix: Path, order: SortedSamples, step: int) -> None:
    """Write the `.idx` of the sorted samples, with a row for every `step` distinct values."""
    writer = RowIndexWriter(prefix, order.dtype)
    pending = np.empty(0, dtype=np.int64)  # samples of the values of an incomplete row
    for counts in order.counts():
        pending = np.concatenate([pending, counts[:, 1]])
        whole = pending.size - pending.size % step
        if whole:
            writer.add(pending[:whole].reshape(-1, step).sum(axis=1))
            pending = pending[whole:]
    if pending.size:
        writer.add(pending.sum(keepdims=True))
    writer.close()
