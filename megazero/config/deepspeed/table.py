"""The table of all DeepSpeed JSON keys, and how to find one's row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megazero.config.deepspeed.row import KeyRow
from megazero.config.deepspeed.rows.curriculum import CURRICULUM_ROWS
from megazero.config.deepspeed.rows.data_efficiency import DATA_EFFICIENCY_ROWS
from megazero.config.deepspeed.rows.offload import OFFLOAD_ROWS
from megazero.config.deepspeed.rows.optimizer import OPTIMIZER_ROWS
from megazero.config.deepspeed.rows.skipping import SKIPPING_ROWS
from megazero.config.deepspeed.rows.sparse import SPARSE_ROWS
from megazero.config.deepspeed.rows.tools import FEATURE_ROWS, LOGGING_ROWS
from megazero.config.deepspeed.rows.train import BATCH_ROWS, PRECISION_ROWS, SCHEDULER_ROWS
from megazero.config.deepspeed.rows.zero import ACTIVATION_ROWS, PIPELINE_ROWS, ZERO_ROWS
from megazero.config.words import nearest

GROUPS: Mapping[str, tuple[KeyRow, ...]] = MappingProxyType(
    {
        "Batch sizes": BATCH_ROWS,
        "Optimizer": OPTIMIZER_ROWS,
        "Learning rate schedule": SCHEDULER_ROWS,
        "Precision and gradients": PRECISION_ROWS,
        "ZeRO": ZERO_ROWS,
        "Offload": OFFLOAD_ROWS,
        "Activation checkpointing": ACTIVATION_ROWS,
        "Pipeline": PIPELINE_ROWS,
        "Curriculum": CURRICULUM_ROWS,
        "Data efficiency": DATA_EFFICIENCY_ROWS,
        "Token and layer dropping": SKIPPING_ROWS,
        "Sparse attention": SPARSE_ROWS,
        "Logging": LOGGING_ROWS,
        "Other features": FEATURE_ROWS,
    }
)
"""Heading -> its rows, in the order of the docs."""

_STAGE_3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16": "bf16",
        **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _STAGE_3},
    }
)
"""Other names of sections and keys."""

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

SECTIONS: frozenset[str] = frozenset(
    ".".join(key.split(".")[:depth]) for key in ROWS for depth in range(1, key.count(".") + 1)
)
"""Paths that are not keys themselves but hold some."""


def is_remark(path: str) -> bool:
    """Whether a key that is not in the table is a remark, or is known to be read by nobody."""
    name = path.rpartition(".")[2].lower()
    return name.startswith(("_", "#", "//", "comment")) or name == "cuda_visible_devices"


def near_miss(path: str) -> str | None:
    """The key of the table that one that is not there may stand for."""
    section, _, name = path.rpartition(".")
    known = [key for key in (*ROWS, *SECTIONS) if key.rpartition(".")[0] == section]
    close = nearest(name, [key.rpartition(".")[2] for key in known])
    home = next((key for key in ROWS if key.rpartition(".")[2] == name), None)
    if home is None and close is not None:
        home = f"{section}.{close}" if section else close
    return home


def unknown_key(path: str) -> str:
    """The complaint about a key that is not in the table, with the nearest one that is."""
    home = near_miss(path)
    hint = f"did you mean `{home}`?" if home else "docs/deepspeed_json.md lists the keys."
    return f"unknown key `{path}`; {hint}"
