"""The table of all DeepSpeed JSON keys, and how to find one's row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megazero.config.deepspeed.section import NOTHING, JsonSection, KeyRow
from megazero.config.deepspeed.sections import data, features, layers, optimizer, training, zero
from megazero.config.words import nearest

MODELS: tuple[type[JsonSection], ...] = tuple(
    section
    for module in (optimizer, training, zero, data, layers, features)
    for section in vars(module).values()
    if isinstance(section, type) and issubclass(section, JsonSection) and section is not JsonSection
)
"""All sections, in the order of the docs."""


def _groups() -> dict[str, tuple[KeyRow, ...]]:
    groups: dict[str, tuple[KeyRow, ...]] = {}
    for model in MODELS:
        groups[model.heading] = (*groups.get(model.heading, ()), *model.rows())
    return groups


GROUPS: Mapping[str, tuple[KeyRow, ...]] = MappingProxyType(_groups())
"""Heading -> its rows, in the order of the docs."""

PYDANTIC: frozenset[str] = frozenset(
    {
        *("zero_optimization", "fp16", "bf16", "tensorboard", "wandb", "comet", "csv_monitor"),
        *("comms_logger", "compile", "hybrid_engine", "tensor_parallel", "weight_quantization"),
    }
)
"""The sections in which DeepSpeed drops keys that are "auto" and refuses those that it does not know."""

LOOSE: frozenset[str] = frozenset(
    {
        *("", "activation_checkpointing", "flops_profiler", "checkpoint", "checkpoint.parallel_write"),
        *("checkpoint.writer", "pipeline", "aio", "data_types", "optimizer", "scheduler", "timers"),
    }
)
"""The sections, with the whole file, in which DeepSpeed leaves keys that it does not know alone."""


def _table() -> dict[str, KeyRow]:
    table: dict[str, KeyRow] = {}
    for row in (row for rows in GROUPS.values() for row in rows):
        assert row.key not in table, f"{row.key} has two rows"
        table[row.key] = row
    return table


ROWS: Mapping[str, KeyRow] = MappingProxyType(_table())
"""Key path -> its row."""

_STAGE_3 = "zero_optimization.stage3_"
_FORMER = f"{_STAGE_3}gather_fp16_weights_on_model_save"
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16": "bf16",
        **{
            key.replace("stage3_", ""): key
            for key, row in ROWS.items()
            if key.startswith(_STAGE_3) and row.upstream.default is not NOTHING and key != _FORMER
        },
    }
)
"""Other names of sections and keys. A current key `stage3_X` may also be written `X`."""

SECTIONS: frozenset[str] = frozenset(
    ".".join(key.split(".")[:depth]) for key in ROWS for depth in range(1, key.count(".") + 1)
)
"""Paths of the objects that hold keys."""


def is_remark(path: str) -> bool:
    """Whether a key that is not in the table is a remark, or one that nothing reads."""
    name = path.rpartition(".")[2].lower()
    return name.startswith(("_", "#", "//", "comment")) or name == "cuda_visible_devices"


def near_miss(path: str) -> str | None:
    """Return the key of the table that an unknown key may stand for; None if there is none."""
    section, _, name = path.rpartition(".")
    known = [key for key in (*ROWS, *SECTIONS) if key.rpartition(".")[0] == section]
    close = nearest(name, [key.rpartition(".")[2] for key in known])
    elsewhere = next((key for key in ROWS if key.rpartition(".")[2] == name), None)
    if elsewhere is None and close is not None:
        return f"{section}.{close}" if section else close
    return elsewhere


def unknown_key(path: str) -> str:
    """Return the complaint about a key that is not in the table, with the nearest one that is."""
    near = near_miss(path)
    hint = f"did you mean `{near}`?" if near else "docs/deepspeed_json.md lists the keys."
    return f"unknown key `{path}`; {hint}"
