"""The section of the tree about what a run tells."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

_NO_EVENTS = here.tensorboard_dir.because("there are no TensorBoard events")
_NO_WANDB = here.wandb_project.because("nothing goes to Weights & Biases")

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "barrier"
]
"""An operation of a group."""


class LoggingConfig(Section):
    """Logging"""

    roles = Role.QUIET

    log_interval: PositiveInt = option(100, "iterations between log lines", unit="iterations")
    metrics_jsonl: str | None = option(None, "file that gets one JSON object per iteration", Role.LOCAL)
    tensorboard_dir: str | None = option(
        None, "folder for TensorBoard events", Role.LOCAL, package="tensorboard"
    )
    tensorboard_log_interval: PositiveInt = option(
        1, "iterations between events", Role.LOCAL, unit="iterations"
    )
    tensorboard_queue_size: PositiveInt = option(1000, "events held before they are written", Role.LOCAL)
    log_validation_ppl_to_tensorboard: bool = option(
        False, "also record validation perplexity", idle_without=_NO_EVENTS
    )
    log_timers_to_tensorboard: bool = option(
        False, "also record the time of each phase", idle_without=_NO_EVENTS
    )
    wall_clock_breakdown: bool = option(
        False, "also print where the time went; the same as `--timing-log-level 2`"
    )
    timing_log_level: Literal[0, 1, 2] = option(
        0, "also print where the time went: by phase with 1, and with 2 also by what it waited for"
    )
    timing_log_option: Literal["max", "minmax", "all"] = option(
        "minmax",
        "the ranks whose times are printed beside the first rank's: the slowest, also the fastest, or all",
        needs=here.wall_clock_breakdown | here.timing_log_level.among(1, 2),
    )
    comms_logger: bool = option(False, "count and time communication, and print a table of it at the end")
    comms_logger_ops: tuple[Operation, ...] = option(
        (), "the operations that it times; all by default", needs=here.comms_logger
    )
    comms_logger_verbose: bool = option(
        False, "also print each call on the first rank", needs=here.comms_logger
    )
    csv_dir: str | None = option(None, "folder for one CSV file per metric", Role.LOCAL)
    log_params_norm: bool = option(False, "also record the norm of the parameters")
    log_stability: PositiveInt | None = option(
        None,
        "also record how steady the training is: the standard deviation of loss and gradient norm over so "
        "many updates, and the loss as a multiple of the lowest so far",
        unit="updates",
    )
    straggler_interval: NonNegativeInt = option(
        100,
        "iterations after which the ranks' times are compared, to name one that is slow; 0 compares nothing",
        unit="iterations",
    )
    log_num_zeros_in_grad: bool = option(False, "also record how many gradient elements are zero")
    log_max_attention_logit: bool = option(
        False,
        "also record the largest attention logit of each step, before the softmax: of all layers, heads and "
        "ranks. Each layer multiplies queries and keys once more",
        needs=(
            config.acceleration.compile.is_off.because("compiled layers show nobody their logits"),
            config.acceleration.cuda_graph.is_off.because("captured layers show nobody their logits"),
        ),
    )
    wandb_project: str | None = option(
        None, "Weights & Biases project; needs the wandb package", Role.LOCAL, package="wandb"
    )
    wandb_exp_name: str | None = option(None, "Weights & Biases run name", Role.LOCAL, idle_without=_NO_WANDB)
    wandb_save_dir: str | None = option(
        None, "Weights & Biases local folder", Role.LOCAL, idle_without=_NO_WANDB
    )
    wandb_entity: str | None = option(None, "Weights & Biases team", Role.LOCAL, idle_without=_NO_WANDB)
    wandb_group: str | None = option(
        None, "Weights & Biases group of runs", Role.LOCAL, idle_without=_NO_WANDB
    )

    @property
    def breakdown_level(self) -> int:
        """The detail of the table of where the time went; 0 for none."""
        return 2 if self.wall_clock_breakdown else self.timing_log_level
