"""Writes settings as Megatron-LM's arguments, optimizer groups and schedule; the inverse of `settings`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from megazero.checkpoint.manifest import Facts
from megazero.config.derive import FREE_MODEL_FIELDS, model_differences, padded_vocab_size
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.megatron.hybrid import hybrid_arguments
from megazero.formats.megatron.latent import latent_arguments
from megazero.formats.megatron.masked import with_masked_head
from megazero.formats.megatron.settings import COPIED, EXPERTS, GATED, read_settings
from megazero.spec.resolve import model_spec

_Value = TypeVar("_Value")

SECTIONS = ("optimizer", "batch", "training")
"""The sections of settings, besides the model's, that a resumed run needs; they have Megatron's names."""


def arguments_of(model: ModelConfig, vocab_size: int, facts: Facts, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron-LM's arguments for a model and its run.

    Raises:
        CheckpointError: the model has settings that the export does not write; they are named.
    """
    arguments = {
        **{name: getattr(model, name) for name in COPIED if hasattr(model, name)},
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.positions,
        "group_query_attention": model.kv_heads != model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "position_embedding_type": model.position_embedding_type,
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": model.rotary_interleaved,
        "no_rope_freq": None if model.unrotated is None else [*model.unrotated],
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared_relu",
        "bias_gelu_fusion": model.activation == "gelu",
        "quick_geglu": model.activation == "quick_geglu",
        **({name: getattr(model, name) for name in GATED} if model.activation == "quick_geglu" else {}),
        "softmax_type": model.softmax_type,
        "window_size": model.window_size,
        "window_attn_skip_freq": _unwrapped(model.window_attn_skip_freq),
        **_experts(model),
        **latent_arguments(model),
        **hybrid_arguments(model),
        "padded_vocab_size": padded_vocab_size(vocab_size, model, 1),
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        "no_save_rng": True,
        **_run(facts),
    }
    family = {name: getattr(model, name) for name in _BERT} if with_masked_head(model_spec(model)) else {}
    # Read back and compared, so that no setting is lost silently.
    read = read_settings(arguments, family=family, core=True).model
    names = [name for name in ModelConfig.model_fields if name not in FREE_MODEL_FIELDS]
    if differing := model_differences(model, read, names):
        wrong = ", ".join(f"{name} is {ours}" for name, ours, _ in differing)
        raise CheckpointError(
            f"the model must be one that Megatron-LM has, but {wrong}, which this export does not write"
        )
    return arguments


_BERT = ("family", *(name for name in ModelConfig.model_fields if name.startswith("bert_")))


def _unwrapped(value: tuple[_Value, ...] | None) -> tuple[_Value, ...] | _Value | None:
    """The only element of a tuple with one."""
    return value if value is None or len(value) != 1 else value[0]


def _experts(model: ModelConfig) -> dict[str, object]:
    if not model.num_experts:
        return {"num_experts": None}
    if len(set(model.num_experts)) > 1 or model.mlp_type != "standard":
        raise CheckpointError(
            "the model must be one that Megatron-LM has, but its layers have different numbers of experts, "
            "or an MLP beside them, which this export does not write"
        )
    places = [int(count > 0) for count in model.experts_by_layer]
    return {
        **{name: getattr(model, name) for name in EXPERTS},
        "num_experts": model.num_experts[0],
        "moe_layer_freq": 1 if all(places) or model.is_hybrid_model else places,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_router_load_balancing_type": _unwrapped(model.moe_router_load_balancing_type),
        "moe_aux_loss_coeff": _unwrapped(model.moe_aux_loss_coeff),
    }


def _run(facts: Facts) -> dict[str, object]:
    """The run's settings and progress; empty for converted weights."""
    sections, state = facts.get("config"), facts.get("state")
    if not sections or not state:
        return {}
    settings = {name: value for section in SECTIONS for name, value in (sections.get(section) or {}).items()}
    return {
        **settings,
        "global_batch_size": facts["global_batch_size"],
        "seed": facts["stream_seed"],
        "iteration": state["iteration"],
        "consumed_train_samples": state["consumed_samples"],
        "consumed_train_tokens": state["consumed_tokens"],
        "consumed_valid_samples": 0,
    }


def optimizer_of(facts: Facts) -> dict[str, object]:
    """The optimizer's state besides tensors, as Megatron has it without expert parallelism.

    It is given twice: mixed-precision optimizers look for it below another `optimizer`, fp32 optimizers do
    not.

    Raises:
        CheckpointError: the checkpoint is not of a run with Adam's state.
    """
    settings, scaler = (facts.get("config") or {}).get("optimizer") or {}, facts.get("scaler")
    if facts.get("updates") is None or scaler is None or settings.get("optimizer") != "adam":
        raise CheckpointError(
            f"the checkpoint must be of a run of Adam to be written with the optimizer, but is of "
            f"{settings.get('optimizer', 'none')!r}; export with --weights-only"
        )
    own_rate, own_floor = settings.get("decoupled_lr"), settings.get("decoupled_min_lr")
    if own_rate is None and own_floor is not None:
        raise CheckpointError(
            "`decoupled_min_lr` must come with `decoupled_lr` in a run whose optimizer is written, since "
            f"Megatron has no second group without it, but is {own_floor}; export with --weights-only"
        )
    common = (settings["lr"], settings["min_lr"])
    own = (own_rate, settings["min_lr"] if own_floor is None else own_floor)
    # With `decoupled_lr`, embedding and head are a group of their own, and all their parameters decay.
    kinds = [(1.0, False), (0.0, False), *([] if own_rate is None else [(1.0, True)])]
    groups = [
        {
            "lr": (own if decoupled else common)[0],
            "max_lr": (own if decoupled else common)[0],
            "min_lr": (own if decoupled else common)[1],
            "weight_decay": settings["weight_decay"] * decayed,
            "wd_mult": decayed,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": decoupled,
            "betas": (settings["adam_beta1"], settings["adam_beta2"]),
            "eps": settings["adam_eps"],
            "bias_correction": True,
            "step": facts["updates"],
        }
        for decayed, decoupled in kinds
    ]
    state = {"param_groups": groups, "state": {"common_step": facts["updates"]}}
    scale = {
        "scale": torch.tensor([scaler["scale"]]),
        "growth_tracker": scaler["growth_tracker"],
        "hysteresis_tracker": scaler["hysteresis_left"],
    }
    form = {"param_state_sharding_type": "fully_reshardable", "grad_scaler": scale}
    return {"optimizer": {"optimizer": state, **form, **state}}


def schedule_of(facts: Facts) -> dict[str, object]:
    """The state of the learning-rate schedule as Megatron stores it, with lengths in samples."""
    settings, batch, state = facts["config"]["optimizer"], facts["global_batch_size"], facts["state"]
    training, known = facts["config"]["training"], facts.get("lengths") or {}

    def samples(name: str) -> int:
        return int(settings[f"{name}_samples"] or (settings[f"{name}_iters"] or 0) * batch)

    decay = samples("lr_decay") or training["train_samples"] or (training["train_iters"] or 0) * batch
    fraction = settings["lr_warmup_fraction"]
    warmup = samples("lr_warmup") if fraction is None else int(fraction * decay)
    if (unit := known.get("unit")) in ("iters", "samples"):
        warmup, decay = (int(known[name] * (batch if unit == "iters" else 1)) for name in ("warmup", "decay"))
    decays = {end: settings[f"{end}_weight_decay"] for end in ("start", "end")}
    return {
        "opt_param_scheduler": {
            "max_lr": settings["lr"],
            "min_lr": settings["min_lr"],
            "lr_warmup_steps": warmup,
            "lr_decay_steps": decay,
            "lr_decay_style": settings["lr_decay_style"],
            "num_steps": state["consumed_samples"] - state.get("not_updated", {}).get("samples", 0),
            "start_wd": settings["weight_decay"] if decays["start"] is None else decays["start"],
            "end_wd": settings["weight_decay"] if decays["end"] is None else decays["end"],
            "wd_incr_style": settings["weight_decay_incr_style"],
            "wd_incr_steps": known.get("weight_decay") or decay,
        }
    }
