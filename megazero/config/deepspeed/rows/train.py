"""Rows of the DeepSpeed table: batch sizes, schedule and precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.deepspeed.row import (
    AMOUNT,
    ANYTHING,
    AUTO,
    BOOL,
    COUNT,
    INTEGER,
    INTERVAL,
    NOTHING,
    NUMBER,
    SECTION,
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


def _as_enabled(name: str, values: Values) -> list[str]:
    """The fault of a type of the parameters that is not the one that is enabled."""
    kinds = [kind for kind in ("fp16", "bf16") if values.get(f"{kind}.enabled") is True]
    on, key = (kinds or ["fp32"])[0], "data_types.param_dtype"
    return [] if _DTYPES[name.lower()] == on else [f"`{key}` must be {on}, which is enabled, but is {name}"]


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


def _ranks(key: str, script_refused: str | None = None) -> KeyRow:
    return KeyRow(
        key,
        COUNT,
        convert=lambda size, values: NOTHING if size == 1 else size,
        extra=f"ranks.{key}",
        script_refused=script_refused,
    )


_SCRIPT_SCHEDULE = (
    "a training script takes its schedule from flags; remove the section and give `--lr-decay-style`, "
    "`--lr-warmup-iters` and `--lr-decay-iters`"
)


SCHEDULER_ROWS: tuple[KeyRow, ...] = (
    KeyRow("scheduler.type", TEXT, extra="scheduler", script_refused=_SCRIPT_SCHEDULE),
    KeyRow("scheduler.params", SECTION, extra="scheduler", when="scheduler.type"),
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
    KeyRow(
        "fp16.consecutive_hysteresis",
        BOOL,
        convert=lambda on, values: on or NOTHING,
        extra="consecutive_hysteresis",
        script_refused="tolerated overflows come back when the scale grows, as in Megatron; set it to false",
        when="fp16.enabled",
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
    *ignores("moments are fp32, which takes twice their memory", BOOL, "bf16.bf16_optimizer_states"),
    # Older releases took any key here, and examples copy those of fp16.
    *ignores(
        "bf16 needs no loss scale",
        NUMBER,
        *("bf16.loss_scale", "bf16.loss_scale_window", "bf16.initial_scale_power"),
        *("bf16.hysteresis", "bf16.min_loss_scale"),
    ),
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
    KeyRow(
        "data_types.param_dtype",
        TEXT,
        accepted="`fp16.enabled` and `bf16.enabled` say it",
        only=_A_DTYPE,
        refused=_CHOOSE_DTYPE,
        faults=_as_enabled,
    ),
    *refuses(
        "buffers keep the types that the model gave them; convert them yourself",
        TEXT,
        None,
        "data_types.buffer_dtype",
    ),
    *ignores("buffers keep the types that the model gave them", ANYTHING, "data_types.keep_in_fp32_modules"),
    sets(
        "communication_data_type",
        TEXT,
        "zero.grad_reduce_dtype",
        convert=_dtype,
        only=_A_DTYPE,
        refused=_CHOOSE_DTYPE,
    ),
    KeyRow(
        "seq_parallel_communication_data_type",
        TEXT,
        convert=_dtype,
        extra="ranks.seq_parallel_communication_data_type",
        only=_A_DTYPE,
        refused=_CHOOSE_DTYPE,
        accepted="gradients are sent in it where `megazero.initialize` shares sequences; a training script "
        "sends them as `communication_data_type` says",
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
    *refuses(
        "gradients are averaged; multiply the loss by the number of ranks instead",
        TEXT,
        only("mean"),
        "gradient_allreduce_op",
    ),
    KeyRow(
        "managed_gradient_accumulation",
        BOOL,
        convert=lambda counted, values: NOTHING if counted else False,
        extra="managed_gradient_accumulation",
        script_refused="micro-batches are counted; set it to true",
    ),
    _ranks("sequence_parallel_size"),
    _ranks("data_parallel_size", "what other axes leave of the ranks is data parallel; leave it out"),
    sets("seed", INTEGER, "training.seed"),
)
