"""Sections of the tree about the length of a training, its evaluations and its batches."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt

from megazero.config.condition import config, here
from megazero.config.stairs import Stairs, final_size
from megazero.config.tree.option import Duration, Interval, Section, option
from megazero.config.tree.roles import Role

_NO_TASK = config.finetune.task.is_none.because("`--train-data` and `--epochs` take its place")


class BatchConfig(Section):
    """Batch sizes"""

    roles = Role.SCHEDULE

    micro_batch_size: PositiveInt = option(..., "sequences per forward pass on one replica", Role.TOLD)
    global_batch_size: PositiveInt | None = option(
        None, "sequences per optimizer step; default: micro batch x data-parallel size"
    )
    step_batch_size_schedule: Stairs = option(
        (),
        "THRESHOLD:SIZE ...: the global batch from each number of tokens on, such as 0:768 250B:1536; K, M, "
        "B and T are thousands to trillions; instead of --global-batch-size",
        needs=(here.rampup_batch_size.is_none, _NO_TASK),
    )
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = option(
        None,
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES",
        needs=(here.global_batch_size.because("it says where the ramp ends"), _NO_TASK),
    )

    @property
    def final_batch_size(self) -> int | None:
        """The global batch at the end of the training; None if nothing gives it."""
        stairs = self.step_batch_size_schedule
        return final_size(stairs) if stairs else self.global_batch_size


def _none_below_zero(batches: Any) -> Any:
    return 0 if isinstance(batches, int) and batches < 0 else batches


Batches = Annotated[NonNegativeInt, BeforeValidator(_none_below_zero)]

"""How many batches; both Megatrons evaluate where there is at least one, so -1 is none."""


class TrainingConfig(Section):
    """Training length and evaluation"""

    train_iters: PositiveInt | None = option(
        None, "length of the training", Role.LENGTH | Role.SCHEDULE, unit="iterations", needs=_NO_TASK
    )
    train_samples: PositiveInt | None = option(
        None,
        "length of the training",
        Role.LENGTH | Role.SCHEDULE,
        unit="samples",
        needs=(
            _NO_TASK,
            here.train_iters.is_none.because(
                "`--train-tokens` may go with either, and the first limit ends the training"
            ),
        ),
    )
    train_tokens: PositiveInt | None = option(
        None, "length of the training", Role.LENGTH | Role.SCHEDULE, unit="tokens", needs=_NO_TASK
    )
    seed: NonNegativeInt = option(1234, "seed of initial weights, data order and dropout")
    eval_interval: Interval = option(
        1000, "iterations between evaluations; 0: only one, at the end", Role.LENGTH, unit="iterations"
    )
    eval_iters: Batches = option(100, "global batches per evaluation; 0 or less turns it off")
    eval_from_start: bool = option(
        False,
        "let every evaluation read the same validation samples, the first ones, so that losses of different "
        "steps and runs compare; default: each reads the next ones",
    )
    exit_interval: Interval = option(
        None, "save and exit at multiples of this; default, and with 0: never", unit="iterations"
    )
    exit_duration_in_mins: Duration = option(
        None, "save and exit after so long; default, and with 0: never", unit="minutes"
    )
    skip_train: bool = option(
        False,
        "evaluate and test only",
        needs=config.finetune.task.is_none.because("`--epochs 0` takes its place"),
    )
    deterministic_mode: bool = option(False, "use only kernels that give the same bits each time")
