"""The section `data_sampling`: curricula over the difficulty of samples, such as the rarity of words."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.condition import config, here
from megazero.config.pacing import Pacing, levels_of, root_of
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

_ANY_ORDER = here.curriculum_metrics.because("samples are not drawn by difficulty")


class CurriculumMetric(Section):
    """A measure of the difficulty of samples, and the schedule of the difficulty that a step may take.

    YAML and DeepSpeed's JSON give it as a mapping below its name, with the last five settings in
    `schedule_config`; the names are DeepSpeed's.

    Attributes:
        name: name of the metric.
        index_to_sample_path, index_to_metric_path: the analyzer's files, without .bin or .idx.
        difficulty_type: whether difficulties are values of the metric, or percentiles of the samples.
        clustering_type: schedule_based; a single_cluster is not sampled by the metric.
        min_difficulty, max_difficulty: the first and the last difficulty. With percentile,
            `max_difficulty` is all samples, and 100 by default.
        schedule_type: how the difficulty grows from the first to the last.
        total_curriculum_step: the length of a ramp, in steps or tokens.
        difficulty_step: difficulties are rounded down to multiples of this.
        root_degree: fixed_root: the degree of the root.
        difficulty, max_step: fixed_discrete: the difficulties, and the last step of each but the last.
    """

    name: str
    index_to_sample_path: str = ""
    index_to_metric_path: str = ""
    difficulty_type: Literal["value", "percentile"] = "value"
    clustering_type: Literal["schedule_based", "single_cluster"] = "schedule_based"
    min_difficulty: int | None = None
    max_difficulty: int | None = None
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"]
    total_curriculum_step: PositiveInt | None = None
    difficulty_step: PositiveInt = 1
    root_degree: PositiveFloat | None = None
    difficulty: tuple[int, ...] = ()
    max_step: tuple[PositiveInt, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def end(self) -> int | None:
        """The last difficulty of a ramp; with percentile, it stands for all samples."""
        default = 100 if self.difficulty_type == "percentile" else None
        return default if self.max_difficulty is None else self.max_difficulty

    @property
    def pacing(self) -> Pacing | None:
        """The difficulty as a function of steps or tokens; None if the settings contradict each other."""
        if self.schedule_type == "fixed_discrete":
            return levels_of(self.difficulty, self.max_step)
        degree = 1.0 if self.schedule_type == "fixed_linear" else self.root_degree
        return root_of(
            self.min_difficulty, self.end, self.total_curriculum_step, self.difficulty_step, degree
        )


class DataSamplingConfig(Section):
    """Curriculum over samples"""

    roles = Role.SCHEDULE

    curriculum_metrics: tuple[CurriculumMetric, ...] = option(
        (),
        needs=(
            config.finetune.task.is_none,
            config.data.data_sharding.is_off.because("that order depends on the ranks"),
        ),
    )
    """what makes samples difficult, by name, as in DeepSpeed's JSON: training draws from the samples that are
    within the difficulty of the step by all of these metrics; JSON, or a JSON or YAML file"""
    curriculum_unit: Literal["iters", "tokens"] = option("iters", idle_without=_ANY_ORDER)
    """what the schedules of the metrics count; tokens are those before the step"""
    curriculum_seed: NonNegativeInt | None = option(None, roles=Role.TOLD, idle_without=_ANY_ORDER)
    """seed of the order in which samples are drawn; default: the training's"""
