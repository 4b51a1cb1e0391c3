"""The section of the tree about what a run tells."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from megazero.config.tree.option import Section, option


class LoggingConfig(Section):
    """Logging"""

    log_interval: PositiveInt = option(100, "iterations between log lines", unit="iterations")
    metrics_jsonl: str | None = option(None, "file that gets one JSON object per iteration")
    tensorboard_dir: str | None = option(None, "folder for TensorBoard events")
    tensorboard_log_interval: PositiveInt = option(1, "iterations between events", unit="iterations")
    tensorboard_queue_size: PositiveInt = option(1000, "events held before they are written")
    log_validation_ppl_to_tensorboard: bool = option(False, "also record validation perplexity")
    log_timers_to_tensorboard: bool = option(False, "also record the time of each phase")
    wall_clock_breakdown: bool = option(False, "also print the time of each phase")
    comms_logger: bool = option(
        False, "count the collectives and their bytes, and print a summary at the end"
    )
    csv_dir: str | None = option(None, "folder for one CSV file per metric")
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
    wandb_project: str | None = option(None, "Weights & Biases project; needs the wandb package")
    wandb_exp_name: str | None = option(None, "Weights & Biases run name")
    wandb_save_dir: str | None = option(None, "Weights & Biases local folder")
    wandb_entity: str | None = option(None, "Weights & Biases team")
    wandb_group: str | None = option(None, "Weights & Biases group of runs")
