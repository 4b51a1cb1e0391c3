"""The section `checkpoint`: saving, loading and keeping checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Interval, Section, option
from megazero.config.tree.roles import Role

_UNSAVED = here.save.because("nothing is saved")
_UNREAD = here.load.because("no checkpoint is read")


class CheckpointConfig(Section):
    """Checkpoints"""

    roles = Role.QUIET

    save: str | None = option(None)
    """folder to write checkpoints to"""
    load: str | None = option(None)
    """folder to read the latest checkpoint from"""
    ckpt_step: NonNegativeInt | None = option(None, unit="iterations", idle_without=_UNREAD)
    """load the checkpoint of this iteration, and no other; default: the latest"""
    load_hf: str | None = option(None)
    """folder of a Hugging Face model to take the weights from, where --load has no checkpoint yet"""
    moe_use_upcycling: bool = option(
        False,
        needs=(
            config.model.num_experts,
            (here.load | here.load_hf).because("it is the folder of the dense model"),
            config.finetune.task.is_none.because("pretrain the model with experts first"),
            config.model.moe_router_topk_scaling_factor.among(None, 1.0).because(
                "copies of one MLP are to compute what it does"
            ),
            (config.model.mlp_type == "standard").because("the dense model has no MLP beside the experts"),
            config.model.moe_shared_expert_intermediate_size.is_none.because(
                "the dense model has no MLP beside the experts"
            ),
            config.model.moe_expert_capacity_factor.is_none.because(
                "a dropped token would miss the MLP that it went through before"
            ),
        ),
    )
    """where --load or --load-hf has a dense model, begin experts from it: each is a copy of the MLP whose
    place it takes"""
    save_hf: str | None = option(None, roles=Role.LOCAL | Role.OUTPUT)
    """new folder that gets the trained weights where the training ends, as transformers reads them, with a
    version and a hash of each"""
    save_hf_dtype: Literal["float32", "bfloat16", "float16"] = option("float32", needs=here.save_hf)
    """type of the weights in --save-hf"""
    save_interval: Interval = option(None, unit="iterations", idle_without=_UNSAVED)
    """iterations between checkpoints; default, and with 0: one where the run ends, and no other"""
    save_retain_interval: PositiveInt | None = option(None, unit="iterations", idle_without=_UNSAVED)
    """keep one checkpoint per this many iterations; others but the newest --keep-last are removed"""
    keep_last: PositiveInt | None = option(None, aliases=("--most-recent-k",), idle_without=_UNSAVED)
    """keep this many of the newest checkpoints; default: all, or 1 with --save-retain-interval"""
    async_save: bool = option(False, idle_without=_UNSAVED)
    """write checkpoints in the background while training goes on"""
    async_save_limit: PositiveInt = option(1, needs=here.async_save)
    """checkpoints that may be on their way to disk at a time"""
    verify_checkpoint: Literal["full", "size"] = option("full")
    """what to check when loading a checkpoint: the hash of everything that is read, or file sizes"""
    finetune: bool = option(False, aliases=("--load-weights-only",), idle_without=_UNREAD)
    """load weights only and start counting anew"""
    extend_context: bool = option(
        False,
        needs=(
            here.load,
            config.model.position_embedding_type.among("rope", "yarn").because(
                "other positions cannot be scaled"
            ),
        ),
    )
    """take weights of a training at shorter sequences, with another base, scaling or range of the rotary
    positions"""
    no_load_optim: bool = option(False, idle_without=_UNREAD)
    """leave the optimizer state unread"""
    no_load_rng: bool = option(False, idle_without=_UNREAD)
    """take the seed of dropout from the configuration, not the checkpoint"""
    no_save_optim: bool = option(False, idle_without=_UNSAVED)
    """leave the optimizer state unsaved"""
    no_save_rng: bool = option(False, idle_without=_UNSAVED)
    """leave the state of random generators unsaved"""
    exit_on_missing_checkpoint: bool = option(False, idle_without=_UNREAD)
    """fail if --load finds nothing, instead of starting anew"""
    override_opt_param_scheduler: bool = option(
        False, flag="--override-opt_param-scheduler", aliases=("--override-opt-param-scheduler",)
    )
    """go on with the schedules of this configuration where the checkpoint's are others, which is refused
    without it"""
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
        needs=here.override_opt_param_scheduler.is_off.because(
            "one takes the checkpoint's schedule, the other this run's"
        ),
    )
    """go on with the checkpoint's learning rate and weight decay, and their lengths, whatever this
    configuration says"""

    @property
    def kept_last(self) -> int | None:
        """The number of newest checkpoints that are kept; None keeps all."""
        return self.keep_last or (1 if self.save_retain_interval else None)
