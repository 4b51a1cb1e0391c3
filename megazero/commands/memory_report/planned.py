"""The memory of a training that is not run: a rank of each pipeline stage, on paper."""

from __future__ import annotations

from megazero.commands.memory_report.table import RankMemory
from megazero.config.steps import Progress
from megazero.config.tree.config import Config
from megazero.plan.job import Job, is_apart
from megazero.plan.plan import Plan


def planned_memory(config: Config, ranks: int) -> list[RankMemory]:
    """The memory of the ranks of each stage in a first step.

    Sizes between steps are exact, unless experts are spread unevenly. Activations are what kernels make for
    their results and for backward.

    Args:
        config: the training's configuration.
        ranks: the number of its ranks.

    Raises:
        ConfigError: the model cannot be built on so many ranks.
    """
    job = Job(config, ranks, is_apart(config), Progress())
    return [RankMemory(tuple(job.ranks_of(stage.stage)), stage.memory) for stage in Plan.of(job).stages]
