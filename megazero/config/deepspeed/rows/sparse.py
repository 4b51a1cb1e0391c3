"""Rows of the DeepSpeed table: `sparse_attention`, which DeepSpeed has removed since."""

from __future__ import annotations

from typing import Any

from megazero.config.deepspeed.row import (
    BOOL,
    COUNT,
    COUNTS,
    INDICES,
    SIZE,
    TEXT,
    KeyRow,
    Values,
    ValueShape,
    only,
    sets,
)

SPARSE = "sparse_attention"
MODE = f"{SPARSE}.mode"
_MODES = ("dense", "fixed", "variable", "bigbird", "bslongformer")
_DIRECTIONS = ("unidirectional", "bidirectional")


def _row(key: str, shape: ValueShape, **rest: Any) -> KeyRow:
    """A row of a key that has its field's name."""
    return sets(f"{SPARSE}.{key}", shape, f"model.sparse_{key}", when=MODE, **rest)


def _lower(value: str, values: Values) -> str:
    return value.lower()


SPARSE_ROWS: tuple[KeyRow, ...] = (
    sets(
        MODE,
        TEXT,
        "model.sparse_attention",
        convert=_lower,
        only=only(*_MODES),
        refused=f"choose {', '.join(_MODES[:-1])} or {_MODES[-1]}",
    ),
    _row("block", COUNT),
    sets(
        f"{SPARSE}.attention",
        TEXT,
        "model.sparse_direction",
        convert=_lower,
        only=only(*_DIRECTIONS),
        refused=f"choose {' or '.join(_DIRECTIONS)}",
        when=MODE,
    ),
    _row("different_layout_per_head", BOOL),
    _row("num_local_blocks", COUNT),
    _row("num_global_blocks", COUNT),
    _row("num_different_global_patterns", COUNT),
    _row("horizontal_global_attention", BOOL),
    _row("num_random_blocks", SIZE),
    _row("local_window_blocks", COUNTS),
    _row("global_block_indices", INDICES),
    _row("global_block_end_indices", COUNTS),
    _row("num_sliding_window_blocks", COUNT),
)
