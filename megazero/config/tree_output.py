"""Sections of the tree about what a run leaves behind: checkpoints and logs."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megazero.config.option import Interval, Section, option


class CheckpointConfig(Section):
    """Checkpoints"""

    save: str | None = option(None, "folder to write checkpoints to")
    load: str | None = option(None, "folder to read the latest checkpoint from")
    ckpt_step: NonNegativeInt | None = option(
        None, "load the checkpoint of this iteration, and no other; default: the latest", unit="iterations"
    )
    load_hf: str | None = option(
        None, "folder of a Hugging Face model to take the weights from, where --load has no checkpoint yet"
    )
    moe_use_upcycling: bool = option(
        False,
        "where --load or --load-hf has a dense model, begin experts from it: each is a copy of the MLP whose "
        "place it takes",
    )
    save_interval: Interval = option(
        None,
        "iterations between checkpoints; default, and with 0: one where the run ends, and no other",
        unit="iterations",
    )
    save_retain_interval: PositiveInt | None = option(
        None,
        "keep one checkpoint per this many iterations; others but the newest --keep-last are removed",
        unit="iterations",
    )
    keep_last: PositiveInt | None = option(
        None,
        "keep this many of the newest checkpoints; default: all, or 1 with --save-retain-interval",
        aliases=("--most-recent-k",),
    )
    async_save: bool = option(False, "write checkpoints in the background while training goes on")
    async_save_limit: PositiveInt = option(1, "checkpoints that may be on their way to disk at a time")
    verify_checkpoint: Literal["full", "size"] = option(
        "full", "what to check when loading a checkpoint: the hash of everything that is read, or file sizes"
    )
    finetune: bool = option(
        False,
        "load weights only and start counting anew",
        aliases=("--load-weights-only",),
    )
    no_load_optim: bool = option(False, "leave the optimizer state unread")
    no_load_rng: bool = option(False, "take the seed of dropout from the configuration, not the checkpoint")
    no_save_optim: bool = option(False, "leave the optimizer state unsaved")
    no_save_rng: bool = option(False, "leave the state of random generators unsaved")
    exit_on_missing_checkpoint: bool = option(False, "fail if --load finds nothing, instead of starting anew")
    override_opt_param_scheduler: bool = option(
        False,
        "take schedule values from the configuration, not the checkpoint",
        flag="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )

    @property
    def kept_last(self) -> int | None:
        """The number of newest checkpoints that are kept; None keeps all."""
        return self.keep_last or (1 if self.save_retain_interval else None)


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
