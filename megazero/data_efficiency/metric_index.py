"""The samples of a dataset in the order of a metric, from an analyzer's index files.

The two files are in DeepSpeed's format: row i of `{metric}_index_to_metric` is the i-th distinct value, and
row i of `{metric}_index_to_sample` lists the samples with that value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.data_efficiency.row_file import RowFile
from megazero.errors import DataError

_BLOCK = 1 << 22  # samples per vectorised check, to bound memory


@dataclass(frozen=True)
class MetricIndex:
    """All samples of a dataset, sorted by the value of a metric.

    values: int64 [d], the distinct values, ascending. ends: int64 [d]; ends[i] is the number of samples with
    a value <= values[i]. samples: integers [n], the sorted sample numbers, memory-mapped; samples of equal
    value are in the order of the file.
    """

    values: np.ndarray
    ends: np.ndarray
    samples: np.ndarray

    @classmethod
    def open(cls, index_to_sample: str | Path, index_to_metric: str | Path) -> MetricIndex:
        """Open the two files of megazero's or DeepSpeed's analyzer, paths without .bin or .idx.

        Memory grows with the number of distinct values, but not with the number of samples. Raises DataError,
        naming the file, if one is missing, damaged, empty or of floating-point numbers, or if the two do not
        belong together. Checks that take a pass over all samples are left to `verify`.
        """
        rows, metric = RowFile(index_to_sample), RowFile(index_to_metric)
        if len(rows) != len(metric):
            raise DataError(
                f"`{rows.path_idx}` must have a row for each of the {len(metric)} values in "
                f"{metric.path_idx}, but has {len(rows)}; give the two files of one metric, and not the "
                "percentile-merged one."
            )
        if not len(rows) or not rows.elements.size:
            raise DataError(f"`{rows.path_idx}` must list samples, but is empty; analyze the dataset again.")
        return cls(_values(metric), np.cumsum(rows.lengths, dtype=np.int64), rows.elements)

    @classmethod
    def of_order(cls, index_to_sample: str | Path) -> MetricIndex:
        """Open the order without the values, which percentiles do not need; `values` are the row numbers.

        The percentile-merged file is accepted too, as it has the same samples in the same order. Errors as in
        `open`.
        """
        rows = RowFile(index_to_sample)
        if not rows.elements.size:
            raise DataError(f"`{rows.path_idx}` must list samples, but is empty; analyze the dataset again.")
        ends = np.cumsum(rows.lengths, dtype=np.int64)
        return cls(np.arange(len(rows), dtype=np.int64), ends, rows.elements)

    def __len__(self) -> int:
        """The number of samples."""
        return self.samples.size

    def verify(self, total: int | None = None, name: str = "index") -> None:
        """Raise DataError unless every sample number is below `total` and occurs once.

        total: samples of the dataset; None for the number of samples in this index. name: of the file, for
        messages. Reads all samples, in blocks, and takes one byte of memory for each.
        """
        total = self.samples.size if total is None else total
        seen = np.zeros(total, dtype=bool)
        for begin in range(0, self.samples.size, _BLOCK):
            block = self.samples[begin : begin + _BLOCK]
            low, high = int(block.min()), int(block.max())
            if low < 0 or high >= total:
                raise DataError(
                    f"`sample` of {name} must be in 0..{total - 1}, but is {low if low < 0 else high}; the "
                    "files are of another dataset: analyze this one."
                )
            seen[block] = True
        if np.count_nonzero(seen) < self.samples.size:
            raise DataError(
                f"`sample` {self._repeated(total)} must come once in {name}, but comes twice; the files are "
                "damaged or were appended to: analyze the dataset again."
            )

    def _repeated(self, total: int) -> int:
        """The number of a sample that is listed twice."""
        counts = np.zeros(total, dtype=np.uint8)
        for begin in range(0, self.samples.size, _BLOCK):
            numbers, times = np.unique(self.samples[begin : begin + _BLOCK], return_counts=True)
            counts[numbers] += np.minimum(times, 2).astype(np.uint8)
            again = numbers[counts[numbers] > 1]
            if again.size:
                return int(again[0])
        raise AssertionError("no sample is listed twice")


def _values(metric: RowFile) -> np.ndarray:
    """The values of an `index_to_metric`, int64 [d]; DataError unless each row has one, and they ascend."""
    if not (metric.lengths == 1).all():
        row = int(np.argmax(metric.lengths != 1))
        raise DataError(
            f"`{metric.path_idx}` must have one value in each row, but row {row} has "
            f"{int(metric.lengths[row])}; give the metric's `_index_to_metric`."
        )
    if int(metric.elements.max()) > np.iinfo(np.int64).max:
        raise DataError(
            f"`values` of {metric.path_bin} must fit 64 bits with a sign, but one is "
            f"{int(metric.elements.max())}; scale the metric down."
        )
    values = metric.elements.astype(np.int64)
    # Compared, not subtracted: a difference of extreme values would overflow.
    falls = np.flatnonzero(values[1:] <= values[:-1])
    if falls.size:
        row = int(falls[0])
        raise DataError(
            f"`values` of {metric.path_bin} must be ascending, but row {row} is {int(values[row])} and row "
            f"{row + 1} is {int(values[row + 1])}; the files are damaged: analyze the dataset again."
        )
    return values
