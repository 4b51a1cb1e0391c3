"""Settings that are accepted without the effect that their name promises: what a run says about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megazero.config.derive import EXPERT_FIELDS, PipelineShape
from megazero.config.fields import FIELD_BY_PATH
from megazero.config.rules.routing import expert_counts
from megazero.config.rules.rule import display_name, value_at
from megazero.config.tree.config import Config

_SAVING = tuple(
    f"checkpoint.{name}"
    for name in (
        "save_interval",
        "save_retain_interval",
        "keep_last",
        "async_save",
        "no_save_optim",
        "no_save_rng",
    )
)
_LOADING = tuple(
    f"checkpoint.{name}"
    for name in ("finetune", "no_load_optim", "no_load_rng", "exit_on_missing_checkpoint", "ckpt_step")
)
_TENSORBOARD = ("logging.log_validation_ppl_to_tensorboard", "logging.log_timers_to_tensorboard")
_MASKED = (
    "model.bert_binary_head",
    "data.mask_prob",
    "data.short_seq_prob",
    "data.bert_pack",
    "data.train_idx_path",
)
_OF_EXPERTS = (
    *(f"model.{name}" for name in EXPERT_FIELDS if name != "num_experts"),
    "parallel.expert_tensor_parallel_size",
    "parallel.moe_token_dispatcher_type",
)
_OF_PROFILES = tuple(f"profiling.profile_{name}" for name in ("ranks", "step_start", "step_end"))
_OF_ROPE = tuple(f"model.{name}" for name in ("rotary_base", "rotary_percent"))
_OF_SCALED_ROPE = tuple(
    f"model.rope_{name}"
    for name in ("scaling_factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
)
_OF_WSD = tuple(f"optimizer.lr_wsd_decay_{unit}" for unit in ("iters", "samples", "tokens"))
_OF_DOCUMENTS = tuple(
    f"data.{name}" for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
)
_WANDB = tuple(f"logging.wandb_{name}" for name in ("exp_name", "save_dir", "entity", "group"))


@dataclass(frozen=True)
class Note:
    """Settings without effect: both Megatrons accept them in silence, and here the run says so.

    Attributes:
        fields: paths of the settings.
        needs: what they have no effect without, in words.
        met: whether a configuration has that.
        effect: what does not happen, as a clause.
    """

    fields: tuple[str, ...]
    needs: str
    met: Callable[[Config], bool]
    effect: str

    @classmethod
    def without(cls, path: str, fields: tuple[str, ...], effect: str) -> Note:
        """A note on settings that need another one, at `path`, to be set."""
        return cls(fields, f"`{display_name(path)}`", lambda config: bool(value_at(config, path)), effect)

    def sentence(self, config: Config) -> str | None:
        """The note of a run; None if none of the settings is given or they have their effect."""
        given = [path for path in self.fields if value_at(config, path) != FIELD_BY_PATH[path].default]
        if not given or self.met(config):
            return None
        names = " and ".join(f"`{display_name(path)}`" for path in given)
        has = "has" if len(given) == 1 else "have"
        return f"{names} {has} no effect without {self.needs}: {self.effect}."


def _floor_counts(config: Config) -> bool:
    """Whether the least capacity of an expert is more than the capacity in training, in every layer."""
    model, counts = config.model, expert_counts(config.model)
    if model.moe_expert_capacity_factor is None or not counts:
        return False
    together = config.batch.micro_batch_size if model.moe_capacity_scope == "micro_batch" else 1
    share = model.seq_length * together * model.moe_router_topk / min(counts)
    return share * model.moe_expert_capacity_factor <= model.moe_min_capacity - 1


def _window_hides(config: Config) -> bool:
    """Whether a window is shorter than the sequence, whose last token it is to hide the first ones from."""
    sides, last = config.model.window_size or (), config.model.seq_length - 1
    return any(0 <= side < last for side in sides[: 1 if config.model.family == "gpt" else 2])


NOTES: tuple[Note, ...] = (
    Note.without("checkpoint.save", _SAVING, "nothing is saved"),
    Note.without("checkpoint.load", _LOADING, "no checkpoint is read"),
    Note.without("logging.tensorboard_dir", _TENSORBOARD, "there are no TensorBoard events"),
    Note.without("logging.wandb_project", _WANDB, "nothing goes to Weights & Biases"),
    Note(
        _MASKED,
        "a BERT",
        lambda config: config.model.family == "bert",
        "`pretrain_bert.py` trains one",
    ),
    Note(
        _OF_PROFILES,
        "`profile`, `memory_timeline_step` or `comms_logger`",
        lambda config: (
            config.profiling.profile
            or config.profiling.memory_timeline_step is not None
            or config.logging.comms_logger
        ),
        "no step is traced",
    ),
    Note(_OF_ROPE, "rotary positions", lambda config: config.model.rotates, "nothing is rotated"),
    Note.without("model.use_rope_scaling", _OF_SCALED_ROPE, "positions are not scaled so"),
    Note(
        _OF_WSD,
        "`--lr-decay-style WSD`",
        lambda config: config.optimizer.lr_decay_style == "WSD",
        "the rate has no final decay of its own",
    ),
    Note(
        ("recompute.method", "recompute.num_layers"),
        "`--recompute-granularity full`",
        lambda config: config.recompute.granularity == "full",
        "no whole layer is recomputed",
    ),
    Note(
        ("parallel.microbatch_group_size_per_virtual_pipeline_stage",),
        "the interleaved schedule",
        lambda config: PipelineShape.of(config).kind == "interleaved",
        "micro-batches do not pass through chunks in groups",
    ),
    Note(
        _OF_DOCUMENTS,
        "a GPT",
        lambda config: config.model.family == "gpt",
        "a BERT's samples stay within one document",
    ),
    Note.without(
        "data_sampling.curriculum_metrics",
        ("data_sampling.curriculum_unit", "data_sampling.curriculum_seed"),
        "samples are not drawn by difficulty",
    ),
    Note(
        ("model.window_size",),
        "a longer `seq_length`",
        _window_hides,
        "the window is as long as the sequence, so it hides nothing in training",
    ),
    Note.without("model.num_experts", _OF_EXPERTS, "no layer has experts"),
    Note(
        ("model.moe_min_capacity", "model.moe_token_drop_policy", "model.moe_capacity_scope"),
        "`moe_expert_capacity_factor`",
        lambda config: not config.model.num_experts or config.model.moe_expert_capacity_factor is not None,
        "no token is dropped",
    ),
    Note(
        ("model.moe_expert_capacity_factor",),
        "a smaller `moe_min_capacity`",
        lambda config: not _floor_counts(config),
        "it gives an expert less than that, and the larger one counts",
    ),
    Note(
        ("model.moe_router_bias_update_rate",),
        "`moe_router_enable_expert_bias`",
        lambda config: not config.model.num_experts or config.model.moe_router_enable_expert_bias,
        "the choice has no bias",
    ),
    Note(
        ("model.moe_router_pre_softmax",),
        "softmax scores",
        lambda config: not config.model.num_experts or config.model.moe_router_score_function == "softmax",
        "sigmoid scores are taken before the choice anyway",
    ),
    Note(
        ("model.moe_aux_loss_coeff",),
        "a `moe_router_load_balancing_type`",
        lambda config: (
            not config.model.num_experts or config.model.moe_router_load_balancing_type != ("none",)
        ),
        "no loss balances the experts",
    ),
)


def notes_on(config: Config) -> list[str]:
    """The notes of a run on its settings without effect."""
    return [line for note in NOTES if (line := note.sentence(config))]
