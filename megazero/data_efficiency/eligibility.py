"""Which samples are eligible in each piece of a training: those within the difficulty of every metric.

A piece is a stretch of the training with constant difficulties. Difficulties never fall, so an eligible
sample stays eligible. If the samples are sorted by their first eligible piece, those of any piece are a
prefix.
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
    """All samples, sorted by the piece in which they become eligible.

    samples: integers [n], sample numbers; samples that are never eligible come last. ends: for each piece,
    the number of eligible samples, a prefix of `samples`; ascending, and at least 1.
    """

    samples: np.ndarray
    ends: tuple[int, ...]

    @classmethod
    def of(cls, difficulties: Difficulties, indexes: Sequence[MetricIndex]) -> EligibilityOrder:
        """The order by the index of each metric of `difficulties`, all of the same samples.

        The order of a single metric is used as it is, and stays on disk. For several metrics, making the
        order takes up to 12 bytes of memory per sample, and keeping it 4 (8 from 2^31 samples on). Each index
        is read once, to check that it lists every sample once.

        Raises:
            DataError: no sample is eligible in the first step, or an index lists a sample twice or one that
                does not exist.
        """
        for metric, index in zip(difficulties.metrics, indexes, strict=True):
            index.verify(len(indexes[0]), metric.name)
        columns = list(zip(*difficulties.levels, strict=True))
        counts = [
            [eligible_samples(index, metric, level) for level in levels]
            for index, metric, levels in zip(indexes, difficulties.metrics, columns, strict=True)
        ]
        if len(indexes) == 1:
            order = cls(indexes[0].samples, tuple(counts[0]))
        else:
            order = cls._of_several(counts, indexes)
        if not order.ends[0]:
            raise _none_eligible(difficulties, indexes, [ends[0] for ends in counts])
        return order

    @classmethod
    def _of_several(cls, counts: list[list[int]], indexes: Sequence[MetricIndex]) -> EligibilityOrder:
        """The order of several metrics. counts: samples eligible by each metric alone, for each piece."""
        pieces, size = len(counts[0]), len(indexes[0])
        narrow = pieces < 1 << 16
        since: NDArray[np.uint16 | np.uint32] = np.zeros(size, dtype=np.uint16 if narrow else np.uint32)
        for ends, index in zip(counts, indexes, strict=True):
            for piece, (begin, end) in enumerate(zip(ends, [*ends[1:], size], strict=True), 1):
                # The samples between the prefix of a piece and that of the next become eligible in the next.
                late = index.samples[begin:end]
                since[late] = np.maximum(since[late], piece)
        order = np.argsort(since, kind="stable").astype(np.int32 if size < 1 << 31 else np.int64)
        eligible_later = np.bincount(since, minlength=pieces + 1)[:pieces].tolist()
        return cls(order, tuple(accumulate(eligible_later)))


def eligible_samples(index: MetricIndex, metric: CurriculumMetric, level: int) -> int:
    """The number of samples of an index within difficulty `level`.

    By value: the samples with values up to `level`. By percentile: level / (largest level) of the samples,
    rounded down, as in DeepSpeed (which rounds the size of 1% down and multiplies it, so that it has up to 99
    samples fewer).
    """
    if metric.difficulty_type == "percentile":
        assert metric.end is not None, "a percentile has a default"
        return len(index) * level // metric.end
    below = int(np.searchsorted(index.values, level, side="right"))
    return int(index.ends[below - 1]) if below else 0


def _none_eligible(
    difficulties: Difficulties, indexes: Sequence[MetricIndex], counts: list[int]
) -> DataError:
    begins = []
    for metric, level, index, count in zip(
        difficulties.metrics, difficulties.levels[0], indexes, counts, strict=True
    ):
        least = f", the least value is {int(index.values[0])}" if metric.difficulty_type == "value" else ""
        begins.append(
            f"{metric.name} has {count} of {len(index)} within {metric.difficulty_type} {level}{least}"
        )
    return DataError(
        f"`min_difficulty` must leave samples for the first step, but there are none ({'; '.join(begins)}); "
        "begin with more, or give more data."
    )
