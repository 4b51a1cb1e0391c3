"""The samples that may be drawn at a time: those within the current difficulty, by every metric at once.

Difficulties never fall, so a sample that may be drawn once may be drawn for good. Sorted by when that is, the
samples of any moment are a prefix of one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megazero.config.difficulties import Difficulties
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.errors import DataError


@dataclass(frozen=True)
class EligibilityOrder:
    """All samples in the order in which they may be drawn.

    samples: integers [n], sample numbers; those that are never eligible come last. ends: for each piece of
    the training, how many of them may be drawn in it; ascending, and at least 1.
    """

    samples: np.ndarray
    ends: tuple[int, ...]

    @classmethod
    def of(cls, difficulties: Difficulties, indexes: Sequence[MetricIndex]) -> EligibilityOrder:
        """The order by one index for each metric of `difficulties`, all of the same samples.

        One metric's own order is taken as it is, and stays on disk. Several take up to 12 bytes of memory for
        each sample while the order is made, and 4 afterwards (8 from 2^31 samples on). Each index is read
        once, to see that it lists every sample once.

        Raises:
            DataError: no sample is eligible in the first step, or an index lists a sample twice or one that
                there is not.
        """
        for metric, index in zip(difficulties.metrics, indexes, strict=True):
            index.verify(len(indexes[0]), metric.name)
        columns = list(zip(*difficulties.levels, strict=True))
        counts = [
            [eligible(index, metric, level) for level in levels]
            for index, metric, levels in zip(indexes, difficulties.metrics, columns, strict=True)
        ]
        if len(indexes) == 1:
            order = cls(indexes[0].samples, tuple(counts[0]))
        else:
            order = cls._of_several(counts, indexes)
        if not order.ends[0]:
            raise DataError(_nobody(difficulties, indexes, [ends[0] for ends in counts]))
        return order

    @classmethod
    def _of_several(cls, counts: list[list[int]], indexes: Sequence[MetricIndex]) -> EligibilityOrder:
        """Build the order of several metrics. counts: samples eligible by each metric in each piece."""
        pieces, size = len(counts[0]), len(indexes[0])
        narrow = pieces < 1 << 16
        since: NDArray[np.uint16 | np.uint32] = np.zeros(size, dtype=np.uint16 if narrow else np.uint32)
        for ends, index in zip(counts, indexes, strict=True):
            for piece, (begin, end) in enumerate(zip(ends, [*ends[1:], size], strict=True), 1):
                # What comes after this piece's prefix, up to the next one's, is eligible a piece later.
                late = index.samples[begin:end]
                since[late] = np.maximum(since[late], piece)
        order = np.argsort(since, kind="stable").astype(np.int32 if size < 1 << 31 else np.int64)
        eligible_later = np.bincount(since, minlength=pieces + 1)[:pieces].tolist()
        return cls(order, tuple(accumulate(eligible_later)))


def eligible(index: MetricIndex, metric: CurriculumMetric, level: int) -> int:
    """The number of the first samples of an index that are within a difficulty.

    By value: those whose value is not above it. By percentile: that share of the samples, rounded down, where
    the metric's largest difficulty is all of them, as in DeepSpeed (which rounds a single percent down and
    multiplies, so that it has up to 99 samples fewer).
    """
    if metric.difficulty_type == "percentile":
        assert metric.end is not None, "a percentile has a default"
        return len(index) * level // metric.end
    below = int(np.searchsorted(index.values, level, side="right"))
    return int(index.ends[below - 1]) if below else 0


def _nobody(difficulties: Difficulties, indexes: Sequence[MetricIndex], counts: list[int]) -> str:
    """Say why there is no sample to begin with."""
    begins = []
    for metric, level, index, count in zip(
        difficulties.metrics, difficulties.levels[0], indexes, counts, strict=True
    ):
        least = f", the least value is {int(index.values[0])}" if metric.difficulty_type == "value" else ""
        begins.append(
            f"{metric.name} has {count} of {len(index)} within {metric.difficulty_type} {level}{least}"
        )
    return (
        f"`min_difficulty` must leave samples for the first step, but there are none ({'; '.join(begins)}); "
        "begin with more, or give more data."
    )
