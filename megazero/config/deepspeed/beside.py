"""A DeepSpeed JSON beside flags: which of the two takes precedence where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megazero.config.deepspeed.section import AUTO, Values, say
from megazero.config.deepspeed.sections.training import BatchSizes
from megazero.config.flags import Setting
from megazero.config.tree.precision import PrecisionConfig

_FLAG_COUNTS = ("optimizer.lr", "logging.tensorboard_dir")
"""Fields whose flag takes precedence over the JSON, as the flags of batch sizes do."""


def flags_without_effect(flags: Sequence[Setting], values: Values) -> list[Setting]:
    """Return the flags that have no effect beside this JSON.

    These are `--loss-scale`, where the JSON has no static scale, and `--fp16`, where the JSON enables bf16:
    Megatron-DeepSpeed's engine reads the type and the loss scale from the JSON alone. Its scripts pass the
    exponent of the first scale by the flag (`--loss-scale 15` beside `initial_scale_power` 15). The reverse,
    fp16 in the JSON beside `--bf16`, stays refused: it may overflow where the author does not expect it.

    Args:
        flags: the flags that are given.
        values: path -> value of all fields that the JSON sets or implies.
    """
    dtype = values.get("precision.dtype")
    dynamic = dtype in ("fp16", "bf16") and not values.get("precision.loss_scale")

    def has_none(flag: Setting) -> bool:
        cast = flag.spec.path == "precision.dtype" and (flag.value, dtype) == ("fp16", "bf16")
        return cast or (dynamic and flag.spec.path == "precision.loss_scale")

    return list(filter(has_none, flags))


def without_effect(flag: Setting, name: str, precision: PrecisionConfig) -> str:
    """Return the sentence on a flag that has no effect beside the JSON `name`."""
    source = f"`{precision.dtype}.enabled` of {name}, as in Megatron-DeepSpeed"
    if flag.spec.path == "precision.dtype":
        return (
            f"`{flag.source}` has no effect beside {source}: the model is cast to the type of the JSON. "
            "Leave the flag out."
        )
    scale = "a loss in bf16 is not scaled"
    if precision.dtype == "fp16":
        scale = (
            f"the loss scale is dynamic and starts at {precision.initial_loss_scale:g}; a static one is set "
            "by `fp16.loss_scale` there"
        )
    return f"`{flag.source} {flag.value:g}` has no effect beside {source}: {scale}."


def overruled(flags: Sequence[Setting], settings: Sequence[Setting]) -> list[str]:
    """Return a sentence on each setting of the JSON that a flag overrides, as in Megatron-DeepSpeed."""
    by_path = {flag.spec.path: flag for flag in flags if flag.spec.path in _FLAG_COUNTS}
    return [
        _overruled(by_path[json_setting.spec.path], json_setting.source, json_setting.value)
        for json_setting in settings
        if json_setting.spec.path in by_path and by_path[json_setting.spec.path].value != json_setting.value
    ]


def _overruled(flag: Setting, source: str, value: object) -> str:
    return f"`{flag.source}` {say(flag.value)} takes precedence over {say(value)} of {source}."


def conflicts(flags: Sequence[Setting], settings: Sequence[Setting]) -> list[str]:
    """Return a sentence on each field that a flag and the JSON set differently."""
    by_path = {setting.spec.path: setting for setting in flags}
    rivals = [(by_path[setting.spec.path], setting) for setting in settings if setting.spec.path in by_path]
    return [
        f"`{setting.spec.path}` must be set one way, but `{flag.source}` says {say(flag.value)} and "
        f"{setting.source} says {say(setting.value)}; change one of them."
        for flag, setting in rivals
        if flag.value != setting.value and setting.spec.path not in _FLAG_COUNTS
    ]


def leave_batch_to_flags(
    name: str, values: dict[str, Any], flags: Mapping[str, Setting], data_parallel: int | None
) -> list[str]:
    """Remove the batch sizes from a JSON's `values` that contradict the flags.

    Args:
        name: what messages call the file.
        values: key path -> value of all its keys.
        flags: path -> the flag that sets it.
        data_parallel: ranks that samples are split over, or None.

    Returns:
        A sentence on each size that was removed.
    """
    said: list[str] = []
    total, micro, steps = BatchSizes.names()
    sizes = {total: flags.get("batch.global_batch_size"), micro: flags.get("batch.micro_batch_size")}
    given = {key: flag for key, flag in sizes.items() if flag is not None}
    for key, flag in given.items():
        if values.get(key, AUTO) not in (AUTO, flag.value):
            said.append(_overruled(flag, f"{name}: `{key}`", values.pop(key)))
    known = {key: given[key].value if key in given else values.get(key, AUTO) for key in sizes}
    if not given or data_parallel is None or AUTO in (*known.values(), values.get(steps, AUTO)):
        return said
    if known[total] != known[micro] * values[steps] * data_parallel:
        flag = given.get(micro) or given[total]
        said.append(_overruled(flag, f"{name}: `{steps}`", values.pop(steps)))
    return said
