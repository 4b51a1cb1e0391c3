"""Rows of the DeepSpeed table: batch sizes, schedule and precision."""

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
    INTERVAL,
    NOTHING,
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
    sets("fp16.loss_scale_window", INTERVAL, "precision.loss_scale_window", when="fp16.enabled"),
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
