"""The sections `training` and `batch`: the length of a training, its evaluations and its batches."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt

from megazero.config.condition import config, here
from megazero.config.stairs import Stairs, final_size
from megazero.config.tree.option import Duration, Interval, Section, option
from megazero.config.tree.roles import Role

_NO_TASK = config.finetune.task.is_none.because("`--train-data` and `--epochs` take its place")


class BatchConfig(Section):
    """Batch sizes"""

    roles = Role.SCHEDULE

    micro_batch_size: PositiveInt = option(..., roles=Role.TOLD)
    """sequences per forward pass on one replica"""
    global_batch_size: PositiveInt | None = option(None)
    """sequences per optimizer step; default: micro batch x data-parallel size"""
    step_batch_size_schedule: Stairs = option((), needs=(here.rampup_batch_size.is_none, _NO_TASK))
    """THRESHOLD:SIZE ...: the global batch from each number of tokens on, such as 0:768 250B:1536; K, M, B
    and T are thousands to trillions; instead of --global-batch-size"""
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = option(
        None, needs=(here.global_batch_size.because("it says where the ramp ends"), _NO_TASK)
    )
    """START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES"""

    @property
    def final_batch_size(self) -> int | None:
        """The global batch at the end of the training; None if nothing gives it."""
        stairs = self.step_batch_size_schedule
        return final_size(stairs) if stairs else self.global_batch_size


def _none_below_zero(batches: object) -> object:
    return 0 if isinstance(batches, int) and batches < 0 else batches


Batches = Annotated[NonNegativeInt, BeforeValidator(_none_below_zero)]
"""A number of batches. Both Megatrons evaluate if it is at least 1, so a negative number is 0."""


class TrainingConfig(Section):
    """Training length and evaluation"""

    train_iters: PositiveInt | None = option(
        None, roles=Role.LENGTH | Role.SCHEDULE, unit="iterations", needs=_NO_TASK
    )
    """length of the training"""
    train_samples: PositiveInt | None = option(
        None,
        roles=Role.LENGTH | Role.SCHEDULE,
        unit="samples",
        needs=(
            _NO_TASK,
            here.train_iters.is_none.because(
                "`--train-tokens` may go with either, and the first limit ends the training"
            ),
        ),
    )
    """length of the training"""
    train_tokens: PositiveInt | None = option(
        None, roles=Role.LENGTH | Role.SCHEDULE, unit="tokens", needs=_NO_TASK
    )
    """length of the training"""
    seed: NonNegativeInt = option(1234)
    """seed of initial weights, data order and dropout"""
    eval_interval: Interval = option(1000, roles=Role.LENGTH, unit="iterations")
    """iterations between evaluations; 0: only one, at the end"""
    eval_iters: Batches = option(100)
    """global batches per evaluation; 0 or less turns it off"""
    eval_from_start: bool = option(False)
    """let every evaluation read the same validation samples, the first ones, so that losses of different
    steps and runs compare; default: each reads the next ones"""
    eval_tasks: str | None = option(
        None, needs=(here.eval_tasks_interval, config.model.family == "gpt", config.model.num_classes.is_none)
    )
    """YAML or JSON file of tasks of lm-evaluation-harness, by which the model is scored on the way: a list of
    names, or `tasks` and `include_path`, a folder with more of them"""
    eval_tasks_interval: Interval = option(None, unit="iterations", needs=here.eval_tasks)
    """iterations between evaluations of --eval-tasks; there is one at the end, too"""
    eval_tasks_limit: PositiveInt | None = option(None, needs=here.eval_tasks)
    """the most documents of each of --eval-tasks; default: all"""
    exit_interval: Interval = option(None, unit="iterations")
    """save and exit at multiples of this; default, and with 0: never"""
    exit_duration_in_mins: Duration = option(None, unit="minutes")
    """save and exit after so long; default, and with 0: never"""
    skip_train: bool = option(
        False, needs=config.finetune.task.is_none.because("`--epochs 0` takes its place")
    )
    """evaluate and test only"""
    deterministic_mode: bool = option(False)
    """use only kernels that give the same bits each time"""
