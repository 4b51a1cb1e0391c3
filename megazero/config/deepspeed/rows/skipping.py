"""Rows of the DeepSpeed table: `data_efficiency.data_routing` (random-LTD) and `progressive_layer_drop`."""

from __future__ import annotations

from typing import Any

from megazero.config.deepspeed.row import (
    BOOL,
    COUNT,
    INDICES,
    NOTHING,
    NUMBER,
    TEXT,
    KeyRow,
    Values,
    ValueShape,
    ignores,
    only,
    refuses,
    sets,
)

_ROUTING = "data_efficiency.data_routing"
_LTD = f"{_ROUTING}.random_ltd"
_SCHEDULE = f"{_LTD}.random_ltd_schedule"
_DROP = "progressive_layer_drop"
_SWITCHES = ("data_efficiency.enabled", f"{_ROUTING}.enabled", f"{_LTD}.enabled")


def _on(values: Values) -> bool:
    """Whether all three sections around the settings are on."""
    return all(values.get(switch) is True for switch in _SWITCHES)


def _if_on(value: Any, values: Values) -> Any:
    return value if _on(values) else NOTHING


def _row(key: str, field: str, shape: ValueShape = COUNT) -> KeyRow:
    return sets(f"{_LTD}.{key}", shape, f"skipping.{field}", convert=_if_on)


def _drop(key: str, field: str, **rest: Any) -> KeyRow:
    return sets(f"{_DROP}.{key}", NUMBER, f"skipping.{field}", when=f"{_DROP}.enabled", **rest)


def _enabled(value: Any, values: Values) -> Any:
    return True if _on(values) else NOTHING


SKIPPING_ROWS: tuple[KeyRow, ...] = (
    # Parts of what `random_ltd.enabled` says, as is `data_efficiency.enabled`.
    KeyRow(f"{_ROUTING}.enabled", BOOL, ("skipping.random_ltd",)),
    sets(f"{_LTD}.enabled", BOOL, "skipping.random_ltd", convert=_enabled),
    _row("total_layer_num", "random_ltd_total_layer_num"),
    _row("random_ltd_layer_num", "random_ltd_layer_num"),
    _row("random_ltd_layer_id", "random_ltd_layer_id", INDICES),
    *ignores(
        "masks follow the tokens that are kept, whatever they are called", TEXT, f"{_LTD}.model_mask_name"
    ),
    *ignores("models know which kind they are", TEXT, f"{_LTD}.model_type"),
    *ignores("hidden states have the sequence first", TEXT, f"{_LTD}.hidden_state_order"),
    _row("random_ltd_schedule.min_value", "random_ltd_min_value"),
    _row("random_ltd_schedule.max_value", "random_ltd_max_value"),
    *refuses(
        "the number of tokens grows along a straight line only",
        TEXT,
        only("fixed_linear"),
        f"{_SCHEDULE}.schedule_type",
    ),
    _row("random_ltd_schedule.schedule_config.require_steps", "random_ltd_require_steps"),
    _row("random_ltd_schedule.schedule_config.seq_per_step", "random_ltd_seq_per_step"),
    *refuses(
        "DeepSpeed has no such schedule either; `train_tokens` and `lr_decay_tokens` count what layers see",
        BOOL,
        only(False),
        f"{_LTD}.layer_token_lr_schedule.enabled",
    ),
    sets(f"{_DROP}.enabled", BOOL, "skipping.progressive_layer_drop"),
    _drop("theta", "pld_theta", absent=1.0),
    _drop("gamma", "pld_gamma", absent=0.001),
)
