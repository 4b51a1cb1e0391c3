"""The section of the tree about checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megazero.config.tree.option import Interval, Section, option


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
        needs=(
            "model.num_experts",
            "load or load_hf: it is the folder of the dense model",
            "finetune.task=None: pretrain the model with experts first",
            "model.moe_router_topk_scaling_factor=None,1.0: copies of one MLP are to compute what it does",
            "model.mlp_type=standard: the dense model has no MLP beside the experts",
            "model.moe_shared_expert_intermediate_size=None: the dense model has no MLP beside the experts",
            (
                "model.moe_expert_capacity_factor=None: a dropped token would miss the MLP that it went "
                "through before"
            ),
        ),
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
    async_save_limit: PositiveInt = option(
        1, "checkpoints that may be on their way to disk at a time", needs="async_save"
    )
    verify_checkpoint: Literal["full", "size"] = option(
        "full", "what to check when loading a checkpoint: the hash of everything that is read, or file sizes"
    )
    finetune: bool = option(
        False,
        "load weights only and start counting anew",
        aliases=("--load-weights-only",),
    )
    extend_context: bool = option(
        False,
        "take weights of a training at shorter sequences, with another base, scaling or range of the "
        "rotary positions",
        needs=(
            "load",
            "model.position_embedding_type=rope,yarn: other positions cannot be scaled",
        ),
    )
    no_load_optim: bool = option(False, "leave the optimizer state unread")
    no_load_rng: bool = option(False, "take the seed of dropout from the configuration, not the checkpoint")
    no_save_optim: bool = option(False, "leave the optimizer state unsaved")
    no_save_rng: bool = option(False, "leave the state of random generators unsaved")
    exit_on_missing_checkpoint: bool = option(False, "fail if --load finds nothing, instead of starting anew")
    override_opt_param_scheduler: bool = option(
        False,
        "go on with the schedules of this configuration where the checkpoint's are others, which is refused "
        "without it",
        flag="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "go on with the checkpoint's learning rate and weight decay, and their lengths, whatever this "
        "configuration says",
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
        needs="override_opt_param_scheduler=False: one takes the checkpoint's schedule, the other this run's",
    )

    @property
    def kept_last(self) -> int | None:
        """The number of newest checkpoints that are kept; None keeps all."""
        return self.keep_last or (1 if self.save_retain_interval else None)
