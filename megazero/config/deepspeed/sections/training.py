"""Batch sizes, schedule, precision, and how gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megazero.config.deepspeed.section import (
    AUTO,
    NOTHING,
    Amount,
    Anything,
    Bool,
    Count,
    Declared,
    Integer,
    Interval,
    JsonSection,
    Number,
    Object,
    Only,
    Size,
    Text,
    Values,
    does,
    ignored,
    left_to_flags,
    only,
    refused,
    sets,
)

DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
        **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
        **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    }
)
"""A type as a JSON may spell it -> its short name."""
_DTYPE: Mapping[str, object] = MappingProxyType(
    {
        "only": Only("fp32, fp16 or bf16", lambda value: value.lower() in DTYPE_NAMES),
        "refused": "choose fp32, fp16 or bf16",
    }
)


def _dtype(value: str, values: Values) -> str:
    return DTYPE_NAMES[value.lower()]


def _enabled(own: str, other: str) -> Mapping[str, object]:
    """Return the effect of `own.enabled`: false means fp32, unless the other type is on or "auto"."""

    def convert(on: bool, values: Values) -> object:
        if on:
            return own
        return NOTHING if values.get(f"{other}.enabled") in (True, AUTO) else "fp32"

    return {"convert": convert, "auto": lambda given: given.get("precision.dtype") == own or NOTHING}


def _masters(dtype: str) -> Declared:
    return sets(
        "zero.main_params_dtype",
        "zero.grad_accumulation_dtype",
        convert=lambda on, values: (dtype, dtype) if on else NOTHING,
        default=False,
        getter=f"{dtype}_master_weights_and_gradients",
        when=f"{dtype}.enabled",
    )


def _as_enabled(name: str, values: Values) -> list[str]:
    """Return the fault of a parameter type that is not the enabled one."""
    kinds = [kind for kind in ("fp16", "bf16") if values.get(f"{kind}.enabled") is True]
    on, key = (kinds or ["fp32"])[0], "data_types.param_dtype"
    return (
        [] if DTYPE_NAMES[name.lower()] == on else [f"`{key}` must be {on}, which is enabled, but is {name}"]
    )


class BatchSizes(JsonSection):
    """The batch sizes, whose fields `resolve_batch` sets from all three."""

    heading = "Batch sizes"

    train_batch_size: Count = does(fields=("batch.global_batch_size",), auto=left_to_flags)
    train_micro_batch_size_per_gpu: Count = does(fields=("batch.micro_batch_size",), auto=left_to_flags)
    gradient_accumulation_steps: Count = does(
        fields=("batch.micro_batch_size", "batch.global_batch_size"), auto=left_to_flags
    )


class Scheduler(JsonSection):
    """`scheduler`."""

    at, heading = "scheduler", "Learning rate schedule"

    type: Text = does(
        None,
        extra="scheduler",
        getter="scheduler_name",
        script_refused="a training script takes its schedule from flags; remove the section and give "
        "`--lr-decay-style`, `--lr-warmup-iters` and `--lr-decay-iters`",
    )
    params: Object = does(None, extra="scheduler", when="scheduler.type", getter="scheduler_params")


class Fp16(JsonSection):
    """`fp16`."""

    at, heading, when = "fp16", "Precision and gradients", "fp16.enabled"

    enabled: Bool = sets("precision.dtype", default=False, **_enabled("fp16", "bf16"))
    loss_scale: Amount = sets(
        "precision.loss_scale", convert=lambda scale, values: scale or None, default=0.0, getter=True
    )
    initial_scale_power: Size = sets(
        "precision.initial_loss_scale",
        convert=lambda power, values: 2.0**power,
        only=Only("at most 127", lambda power: power <= 127),
        refused="fp32 cannot hold a larger scale; choose 16",
        default=16,
        absent=16,
    )
    loss_scale_window: Interval = sets("precision.loss_scale_window", default=1000)
    hysteresis: Count = sets("precision.hysteresis", default=2)
    min_loss_scale: Amount = sets("precision.min_loss_scale", default=1)
    consecutive_hysteresis: Bool = does(
        False,
        convert=lambda on, values: on or NOTHING,
        extra="consecutive_hysteresis",
        script_refused="tolerated overflows come back when the scale grows, as in Megatron; set it to false",
    )
    fp16_master_weights_and_grads: Bool = _masters("fp16")
    auto_cast: Bool = does(
        False,
        extra="auto_cast",
        accepted="the model takes tokens, which have no type to cast",
        getter="fp16_auto_cast",
    )


_CHECKED = "gradients are added up as they appear, and every step is checked for inf and nan"
_UNSCALED = "bf16 needs no loss scale"


class Bf16(JsonSection):
    """`bf16`, with the keys of `fp16` that examples copy: older releases took any."""

    at, heading = "bf16", "Precision and gradients"

    enabled: Bool = sets("precision.dtype", default=False, **_enabled("bf16", "fp16"))
    bf16_master_weights_and_grads: Bool = _masters("bf16")
    bf16_optimizer_states: Bool = ignored(
        "moments are fp32, which takes twice their memory", False, getter=True
    )
    loss_scale: Number = ignored(_UNSCALED)
    loss_scale_window: Number = ignored(_UNSCALED)
    initial_scale_power: Number = ignored(_UNSCALED)
    hysteresis: Number = ignored(_UNSCALED)
    min_loss_scale: Number = ignored(_UNSCALED)
    immediate_grad_update: Bool = ignored(_CHECKED, False)
    check_grad_overflow: Bool = ignored(_CHECKED, True)


class DataTypes(JsonSection):
    """`data_types`."""

    at, heading = "data_types", "Precision and gradients"

    grad_accum_dtype: Text = sets(
        "zero.grad_accumulation_dtype", convert=_dtype, default=None, attribute=True, **_DTYPE
    )
    param_dtype: Text = ignored(
        "`fp16.enabled` and `bf16.enabled` say it", None, faults=_as_enabled, attribute=True, **_DTYPE
    )
    buffer_dtype: Text = refused(
        "buffers keep the types that the model gave them; convert them yourself", default=None, attribute=True
    )
    keep_in_fp32_modules: Anything = ignored(
        "buffers keep the types that the model gave them", AUTO, attribute=True
    )


_ROUNDING = "where gradients are divided changes the rounding only"


def _ranks(name: str, script_refused: str | None = None) -> Declared:
    def convert(size: int, values: Values) -> object:
        return NOTHING if size == 1 else size

    return does(convert=convert, extra=f"ranks.{name}", script_refused=script_refused)


class Gradients(JsonSection):
    """The keys at the top about gradients, ranks and random numbers."""

    heading = "Precision and gradients"

    communication_data_type: Text = sets(
        "zero.grad_reduce_dtype", convert=_dtype, default=None, attribute=True, **_DTYPE
    )
    seq_parallel_communication_data_type: Text = does(
        "fp32",
        convert=_dtype,
        extra="ranks.seq_parallel_communication_data_type",
        accepted="gradients are sent in it where `megazero.initialize` shares sequences; a training script "
        "sends them as `communication_data_type` says",
        **_DTYPE,
    )
    prescale_gradients: Bool = does(False, extra="prescale_gradients", accepted=_ROUNDING, attribute=True)
    gradient_predivide_factor: Amount = does(
        1.0, extra="gradient_predivide_factor", accepted=_ROUNDING, seen=True
    )
    sparse_gradients: Bool = refused("gradients of embeddings are dense; leave it out", only(False))
    gradient_allreduce_op: Text = refused(
        "gradients are averaged; multiply the loss by the number of ranks instead",
        only("mean"),
        "mean",
        attribute=True,
    )
    managed_gradient_accumulation: Bool = does(
        True,
        convert=lambda counted, values: NOTHING if counted else False,
        extra="managed_gradient_accumulation",
        script_refused="micro-batches are counted; set it to true",
        attribute=True,
    )
    sequence_parallel_size: Count = _ranks("sequence_parallel_size")
    data_parallel_size: Count = _ranks(
        "data_parallel_size", "what other axes leave of the ranks is data parallel; leave it out"
    )
    seed: Integer = sets("training.seed")
