"""Rows of the DeepSpeed table: the section `curriculum_learning`, over the sequence length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megazero.config.deepspeed.row import (
    BOOL,
    COUNT,
    COUNTS,
    NOTHING,
    TEXT,
    KeyRow,
    Values,
    ValueShape,
    only,
    refuses,
    sets,
)

_SECTION = "curriculum_learning"
_SCHEDULE = "curriculum.seqlen_schedule"
_RAMPS = ("fixed_linear", "fixed_root")


def _with(*schedules: str) -> Callable[[Any, Values], Any]:
    """Make a converter that takes the value with these schedules; the others do not read the key."""

    def convert(value: Any, values: Values) -> Any:
        return value if values.get(f"{_SECTION}.schedule_type") in schedules else NOTHING

    return convert


def _row(key: str, field: str, shape: ValueShape = COUNT, **rest: Any) -> KeyRow:
    return sets(f"{_SECTION}.{key}", shape, f"curriculum.{field}", when=f"{_SECTION}.enabled", **rest)


CURRICULUM_ROWS: tuple[KeyRow, ...] = (
    # A part of what `schedule_type` says.
    KeyRow(f"{_SECTION}.enabled", BOOL, (_SCHEDULE,)),
    *refuses("the only difficulty is seqlen", TEXT, only("seqlen"), f"{_SECTION}.curriculum_type"),
    _row(
        "schedule_type",
        "seqlen_schedule",
        TEXT,
        only=only(*_RAMPS, "fixed_discrete", "custom"),
        refused="there are no others; custom takes its function from --seqlen-custom-schedule",
    ),
    _row("min_difficulty", "seqlen_min_difficulty", convert=_with(*_RAMPS)),
    _row("max_difficulty", "seqlen_max_difficulty", convert=_with(*_RAMPS, "custom")),
    _row("schedule_config.total_curriculum_step", "seqlen_total_curriculum_step", convert=_with(*_RAMPS)),
    _row("schedule_config.difficulty_step", "seqlen_difficulty_step", convert=_with(*_RAMPS)),
    _row("schedule_config.root_degree", "seqlen_root_degree", convert=_with("fixed_root")),
    _row("schedule_config.difficulty", "seqlen_difficulty", COUNTS, convert=_with("fixed_discrete")),
    _row("schedule_config.max_step", "seqlen_max_step", COUNTS, convert=_with("fixed_discrete")),
)
