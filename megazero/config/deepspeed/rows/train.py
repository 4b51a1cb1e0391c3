"""Rows of the DeepSpeed table: batch sizes, optimizer, schedule and precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.deepspeed.row import (
    AMOUNT,
    AUTO,
    BOOL,
    COUNT,
    INTEGER,
    NOTHING,
    NUMBER,
    PAIR,
    SIZE,
    TEXT,
    KeyRow,
    Only,
    Values,
    ignores,
    left_to_flags,
    only,
    refuses,
    sets,
)

_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
        **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
        **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    }
)
_A_DTYPE = Only("fp32, fp16 or bf16", lambda value: value.lower() in _DTYPES)
_CHOOSE_DTYPE = "choose fp32, fp16 or bf16"


def _dtype(value: str, values: Values) -> str:
    return _DTYPES[value.lower()]


def _enabled(own: str, other: str) -> Callable[[bool, Values], Any]:
    """The model's type from `own.enabled`: off means fp32, unless the other type is on or left open."""

    def convert(on: bool, values: Values) -> Any:
        if on:
            return own
        return NOTHING if values.get(f"{other}.enabled") in (True, AUTO) else "fp32"

    return convert


def _if_given(dtype: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda given: True if given.get("precision.dtype") == dtype else NOTHING


BATCH_ROWS: tuple[KeyRow, ...] = (
    # Their fields are set from all three together, by `resolve_batch`.
    KeyRow("train_batch_size", COUNT, ("batch.global_batch_size",), auto=left_to_flags),
    KeyRow("train_micro_batch_size_per_gpu", COUNT, ("batch.micro_batch_size",), auto=left_to_flags),
    KeyRow(
        "gradient_accumulation_steps",
        COUNT,
        ("batch.micro_batch_size", "batch.global_batch_size"),
        auto=left_to_flags,
    ),
)

_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "adam": "adam",
        "adamw": "adam",
        "sgd": "sgd",
        "lamb": "lamb",
        "fusedlamb": "lamb",
        "onebitadam": "onebit-adam",
        "zerooneadam": "zero-one-adam",
        "onebitlamb": "onebit-lamb",
    }
)


def _optimizer(key: str, shape: Any, *fields: str, **rest: Any) -> KeyRow:
    return sets(
        f"optimizer.params.{key}", shape, *fields, extra=f"optimizer.{key}", when="optimizer.type", **rest
    )


# Keys of the 1-bit optimizers, and what they belong to.
_OF_COMPRESSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "freeze_step": ("onebit-adam", "onebit-lamb"),
        **dict.fromkeys(("coeff_beta", "factor_max", "factor_min", "factor_threshold"), ("onebit-lamb",)),
        **dict.fromkeys(
            ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
            ("zero-one-adam",),
        ),
    }
)


def keys_of_other_optimizers(values: Values) -> list[str]:
    """Keys of the 1-bit optimizers that are given, but not of the one that a JSON chooses, if it does."""
    chosen = optimizer_of(values)
    keys = [(f"optimizer.params.{name}", owners) for name, owners in _OF_COMPRESSED.items()]
    return [key for key, owners in keys if chosen is not None and key in values and chosen not in owners]


def optimizer_of(values: Values) -> str | None:
    """The value of `--optimizer` that a JSON's optimizer is."""
    return _OPTIMIZERS.get(values.get("optimizer.type", "").lower())


def is_lamb(values: Values) -> bool:
    """Whether a JSON's optimizer is LAMB, or 1-bit LAMB, which begins as LAMB."""
    return optimizer_of(values) in ("lamb", "onebit-lamb")


def _of_lamb(told: Callable[[Any], Any]) -> Callable[[Any, Values], Any]:
    """What a key of LAMB says; with another optimizer, where only its default is accepted, nothing."""
    return lambda value, values: told(value) if is_lamb(values) else NOTHING


def _corrects(on: bool) -> str:
    # DeepSpeed's FusedLamb multiplies the learning rate, after the trust ratio.
    return "rate" if on else "none"


_ABOVE_0: Mapping[str, Any] = MappingProxyType(
    {
        "only": Only("above 0", lambda factor: factor > 0),
        "refused": "the trust ratio would become 0 or stay as it is; leave it out",
    }
)

OPTIMIZER_ROWS: tuple[KeyRow, ...] = (
    sets(
        "optimizer.type",
        TEXT,
        "optimizer.optimizer",
        convert=lambda name, values: _OPTIMIZERS[name.lower()],
        extra="optimizer.type",
        only=only("Adam", "AdamW", "SGD", "Lamb", "FusedLamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb"),
        refused="choose Adam, AdamW (both decay weights separately from the gradient), SGD, Lamb, "
        "OneBitAdam, ZeroOneAdam or OneBitLamb; others come in a later version",
    ),
    _optimizer("lr", AMOUNT, "optimizer.lr", auto=left_to_flags),
    _optimizer("betas", PAIR, "optimizer.adam_beta1", "optimizer.adam_beta2", auto=left_to_flags),
    _optimizer("eps", AMOUNT, "optimizer.adam_eps", auto=left_to_flags),
    _optimizer("weight_decay", AMOUNT, "optimizer.weight_decay", absent=0.0, auto=left_to_flags),
    _optimizer("momentum", AMOUNT, "optimizer.sgd_momentum", absent=0.0, auto=left_to_flags),
    _optimizer(
        "max_coeff",
        AMOUNT,
        "optimizer.lamb_max_coeff",
        only=Only("above 0", lambda bound: bound > 0),
        refused="a trust ratio of 0 moves nothing; choose 10",
    ),
    _optimizer("min_coeff", AMOUNT, "optimizer.lamb_min_coeff"),
    _optimizer(
        "bias_correction",
        BOOL,
        "optimizer.lamb_bias_correction",
        convert=_of_lamb(_corrects),
        absent=True,
    ),
    # apex's name for what DeepSpeed's LAMB always does.
    _optimizer("use_nvlamb", BOOL, "optimizer.lamb_adapt_all", convert=_of_lamb(lambda on: on), absent=True),
    _optimizer("freeze_step", COUNT, "optimizer.onebit_freeze_step"),
    _optimizer(
        "coeff_beta",
        AMOUNT,
        "optimizer.onebit_lamb_coeff_beta",
        only=Only("at most 1", lambda decay: decay <= 1),
        refused="it is the decay of an average; choose 0.9",
    ),
    _optimizer("factor_max", AMOUNT, "optimizer.onebit_lamb_factor_max", **_ABOVE_0),
    _optimizer("factor_min", AMOUNT, "optimizer.onebit_lamb_factor_min", **_ABOVE_0),
    _optimizer("factor_threshold", AMOUNT, "optimizer.onebit_lamb_factor_threshold", **_ABOVE_0),
    _optimizer("var_freeze_step", COUNT, "optimizer.zero_one_var_freeze_step"),
    _optimizer("var_update_scaler", COUNT, "optimizer.zero_one_var_update_scaler"),
    _optimizer("local_step_scaler", COUNT, "optimizer.zero_one_local_step_scaler"),
    _optimizer("local_step_clipper", COUNT, "optimizer.zero_one_local_step_clipper"),
    *ignores("bits travel over the groups that everything else does", BOOL, "optimizer.params.cuda_aware"),
    *ignores(
        "bits travel over the groups that everything else does", TEXT, "optimizer.params.comm_backend_name"
    ),
    sets("optimizer.params.max_grad_norm", AMOUNT, "optimizer.clip_grad", when="optimizer.type"),
    *refuses(
        "the update always decays weights separately from the gradient; leave it out",
        BOOL,
        only(True),
        "optimizer.params.adam_w_mode",
    ),
    *refuses(
        "gradients always enter the first moment by 1 - beta1; leave it out",
        BOOL,
        only(True),
        "optimizer.params.grad_averaging",
    ),
    *refuses(
        "epsilon is always added to the root; leave it out",
        BOOL,
        only(False),
        "optimizer.params.eps_inside_sqrt",
    ),
    *refuses(
        "there is no such variant; leave it out",
        BOOL,
        only(False),
        "optimizer.params.amsgrad",
        "optimizer.params.nesterov",
        "optimizer.params.maximize",
    ),
    *refuses("there is no such variant; leave it out", NUMBER, only(0), "optimizer.params.dampening"),
    *ignores(
        "the fastest update that is built is used, and all of them compute the same",
        BOOL,
        "optimizer.params.torch_adam",
        "optimizer.params.fused",
        "optimizer.params.foreach",
        "optimizer.params.capturable",
        "optimizer.params.differentiable",
        "optimizer.params.set_grad_none",
        "optimizer.legacy_fusion",
    ),
    sets("gradient_clipping", AMOUNT, "optimizer.clip_grad", auto=left_to_flags),
)

_SCRIPT_SCHEDULE = (
    "a training script takes its schedule from flags; remove the section and give `--lr-decay-style`, "
    "`--lr-warmup-iters` and `--lr-decay-iters`"
)


def _scheduler(key: str, shape: Any, **rest: Any) -> KeyRow:
    return KeyRow(f"scheduler.params.{key}", shape, extra=f"scheduler.{key}", when="scheduler.type", **rest)


SCHEDULER_ROWS: tuple[KeyRow, ...] = (
    KeyRow(
        "scheduler.type",
        TEXT,
        extra="scheduler.type",
        only=Only(
            "WarmupLR, WarmupDecayLR or WarmupCosineLR",
            lambda value: value in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
        ),
        refused="choose WarmupLR, WarmupDecayLR or WarmupCosineLR, or pass a schedule of your own",
        script_refused=_SCRIPT_SCHEDULE,
    ),
    _scheduler("total_num_steps", COUNT, auto=left_to_flags),
    _scheduler("warmup_num_steps", COUNT, auto=left_to_flags),
    _scheduler("warmup_type", TEXT, only=only("log", "linear"), refused="choose log or linear"),
    _scheduler("warmup_min_lr", AMOUNT, auto=left_to_flags),
    _scheduler("warmup_max_lr", AMOUNT, auto=left_to_flags),
    _scheduler("warmup_min_ratio", AMOUNT),
    _scheduler("cos_min_ratio", AMOUNT),
    *refuses(
        "the position in training comes from the checkpoint; leave it out",
        INTEGER,
        only(-1),
        "scheduler.params.last_batch_iteration",
    ),
)

PRECISION_ROWS: tuple[KeyRow, ...] = (
    sets("fp16.enabled", BOOL, "precision.dtype", convert=_enabled("fp16", "bf16"), auto=_if_given("fp16")),
    sets(
        "fp16.loss_scale",
        AMOUNT,
        "precision.loss_scale",
        convert=lambda scale, values: scale or None,
        when="fp16.enabled",
    ),
    sets(
        "fp16.initial_scale_power",
        SIZE,
        "precision.initial_loss_scale",
        convert=lambda power, values: 2.0**power,
        only=Only("at most 127", lambda power: power <= 127),
        refused="fp32 cannot hold a larger scale; choose 16",
        when="fp16.enabled",
        absent=16,
    ),
    sets("fp16.loss_scale_window", COUNT, "precision.loss_scale_window", when="fp16.enabled"),
    sets("fp16.hysteresis", COUNT, "precision.hysteresis", when="fp16.enabled"),
    sets("fp16.min_loss_scale", AMOUNT, "precision.min_loss_scale", when="fp16.enabled"),
    *refuses(
        "tolerated overflows come back when the scale grows, as in Megatron; set it to false",
        BOOL,
        only(False),
        "fp16.consecutive_hysteresis",
    ),
    sets(
        "fp16.fp16_master_weights_and_grads",
        BOOL,
        "zero.main_params_dtype",
        "zero.grad_accumulation_dtype",
        convert=lambda on, values: ("fp16", "fp16") if on else NOTHING,
        when="fp16.enabled",
    ),
    KeyRow(
        "fp16.auto_cast",
        BOOL,
        extra="auto_cast",
        when="fp16.enabled",
        accepted="the model takes tokens, which have no type to cast",
    ),
    sets("bf16.enabled", BOOL, "precision.dtype", convert=_enabled("bf16", "fp16"), auto=_if_given("bf16")),
    sets(
        "bf16.bf16_master_weights_and_grads",
        BOOL,
        "zero.main_params_dtype",
        "zero.grad_accumulation_dtype",
        convert=lambda on, values: ("bf16", "bf16") if on else NOTHING,
        when="bf16.enabled",
    ),
    *refuses("moments are always fp32; leave it out", BOOL, only(False), "bf16.bf16_optimizer_states"),
    *ignores(
        "gradients are added up as they appear, and every step is checked for inf and nan",
        BOOL,
        "bf16.immediate_grad_update",
        "bf16.check_grad_overflow",
    ),
    sets(
        "data_types.grad_accum_dtype",
        TEXT,
        "zero.grad_accumulation_dtype",
        convert=_dtype,
        only=_A_DTYPE,
        refused=_CHOOSE_DTYPE,
    ),
    sets(
        "communication_data_type",
        TEXT,
        "zero.grad_reduce_dtype",
        convert=_dtype,
        only=_A_DTYPE,
        refused=_CHOOSE_DTYPE,
    ),
    KeyRow(
        "prescale_gradients",
        BOOL,
        extra="prescale_gradients",
        accepted="where gradients are divided changes the rounding only",
    ),
    KeyRow(
        "gradient_predivide_factor",
        AMOUNT,
        extra="gradient_predivide_factor",
        accepted="where gradients are divided changes the rounding only",
    ),
    *refuses("gradients of embeddings are dense; leave it out", BOOL, only(False), "sparse_gradients"),
    *refuses("gradients are averaged; leave it out", TEXT, only("mean"), "gradient_allreduce_op"),
    sets("seed", INTEGER, "training.seed"),
)
