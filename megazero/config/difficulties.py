"""The difficulty of each training step, by every metric of a curriculum over samples."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from megazero.config.pacing import Pacing, pieces
from megazero.config.steps import Progress, Steps, Unit
from megazero.config.tree.data_sampling import CurriculumMetric, DataSamplingConfig


@dataclass(frozen=True)
class Difficulties:
    """The difficulties of all metrics as a function of the steps done, or of the tokens.

    Attributes:
        metrics: the metrics of the curriculum.
        starts: counts at which pieces of constant difficulty begin, ascending from 0.
        levels: the difficulty of every metric in each piece.
        unit: the unit of the counts.
    """

    metrics: tuple[CurriculumMetric, ...]
    starts: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]
    unit: Unit

    @classmethod
    def of(cls, settings: DataSamplingConfig) -> Difficulties | None:
        """The difficulties of a run whose metrics keep the rules of `rules/`; None without a curriculum."""
        metrics = settings.curriculum_metrics
        if not metrics:
            return None
        ramps = [pieces(_sound_pacing(metric)) for metric in metrics]
        starts = sorted({count for ramp in ramps for count, _ in ramp})
        columns = []
        for ramp in ramps:
            counts = [count for count, _ in ramp]
            columns.append([ramp[bisect_right(counts, start) - 1][1] for start in starts])
        return cls(metrics, tuple(starts), tuple(zip(*columns, strict=True)), settings.curriculum_unit)

    def piece(self, progress: Progress) -> int:
        """The index of the piece that the step after `progress` lies in."""
        return bisect_right(self.starts, progress.count(self.unit)) - 1

    def at(self, progress: Progress) -> dict[str, int]:
        """The difficulties in the step after `progress`: the name of each metric -> its difficulty."""
        levels = self.levels[self.piece(progress)]
        return {metric.name: level for metric, level in zip(self.metrics, levels, strict=True)}

    def first_samples(self, steps: Steps) -> tuple[int, ...]:
        """The number of samples consumed when each piece begins, in whole steps.

        A piece that began before `steps.start` counts from there: the steps before are unknown.
        """
        return tuple(self.before(start, steps).samples for start in self.starts)

    def before(self, start: int, steps: Steps) -> Progress:
        """The progress before the first step of the piece that begins at the count `start`."""
        reached = start if self.unit == "iters" else steps.reaching(start)
        return steps.before(max(reached, steps.start.iteration))


def _sound_pacing(metric: CurriculumMetric) -> Pacing:
    pacing = metric.pacing
    assert pacing is not None, f"{metric} keeps the rules"
    return pacing
