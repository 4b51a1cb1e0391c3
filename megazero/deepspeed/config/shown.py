"""Sections of a JSON as objects with DeepSpeed's attributes and defaults, for scripts alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from megazero.config.deepspeed.section import AUTO
from megazero.config.deepspeed.sections.training import DTYPE_NAMES
from megazero.config.deepspeed.table import MODELS, ROWS
from megazero.deepspeed.config import Json
from megazero.deepspeed.reports.monitor import get_monitor_config

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        name: {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[short]
        for name, short in DTYPE_NAMES.items()
    }
)
DEEPSPEED_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
"""The names of DeepSpeed's own optimizers, which match in any case."""


class ConfigSection(SimpleNamespace):
    """A section as an object, with the methods of DeepSpeed's pydantic models."""

    def model_dump(self, **options: object) -> dict[str, object]:
        """Return the section and those inside of it as dictionaries; options have no effect."""
        return {k: v.model_dump() if isinstance(v, ConfigSection) else v for k, v in vars(self).items()}

    dict = model_dump

    def model_dump_json(self, **options: Any) -> str:
        """Return the section as JSON text; options are those of `json.dumps`."""
        return json.dumps(self.model_dump(), **options)


def value_at(config: Json, path: str, default: object = None) -> Any:
    """Return the value at a dotted path, with or without ``stage3_``; the default if missing or "auto"."""
    node: object = config
    *parents, last = path.split(".")
    for key in parents:
        node = node.get(key) if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping):
        return default
    plain = last.removeprefix("stage3_")
    value = node.get(f"stage3_{plain}", node.get(plain, default))
    if isinstance(default, dict) and isinstance(value, Mapping):
        return {**default, **value}
    return default if value == AUTO else value


def optimizer_name(config: Json) -> str | None:
    """Return the name of the JSON's optimizer, in lower case if it is one of DeepSpeed's own."""
    name: str | None = value_at(config, "optimizer.type")
    lower = name.lower() if isinstance(name, str) else None
    return lower if lower in DEEPSPEED_OPTIMIZERS else name


def autocast_dtype(config: Json) -> torch.dtype | None:
    """Return the dtype of the section `torch_autocast`; None if it is off or has none."""
    name = value_at(config, "torch_autocast.dtype")
    on = value_at(config, "torch_autocast.enabled", False)
    return DTYPES[str(name)] if on and name is not None else None


def sections_of(given: Json) -> dict[str, object]:
    """Return name -> value for the attributes of `DeepSpeedConfig` that mirror the JSON `given`."""
    shown: dict[str, object] = {}
    for model in (model for model in MODELS if model.attribute):
        section = value_at(given, model.at, model.defaults())
        shown[str(model.attribute)] = section if model.mapping else _section(section, model.defaults())
    for row in (row for row in ROWS.values() if row.upstream.attribute):
        value = value_at(given, row.key, row.upstream.default)
        is_object = isinstance(row.upstream.default, dict)
        shown[str(row.upstream.attribute)] = _section(value, row.upstream.default) if is_object else value
    throughput = {"enabled": True, "synchronized": True}
    shown["timers_config"] = _section(value_at(given, "timers.throughput", throughput), throughput)
    shown["torch_autocast_enabled"] = value_at(given, "torch_autocast.enabled", False)
    lower = "torch_autocast.lower_precision_safe_modules"
    shown["torch_autocast_lower_precision_safe_modules"] = value_at(given, lower)
    shown["torch_autocast_dtype"] = autocast_dtype(given)
    tags = str(value_at(given, "checkpoint.tag_validation", "Warn")).upper()
    shown["checkpoint_config"] = {
        "tag_validation": tags,
        "checkpoint_serialization": value_at(given, "checkpoint.checkpoint_serialization", True),
        "writer": value_at(given, "checkpoint.writer"),
    }
    shown["checkpoint_tag_validation_enabled"] = tags != "IGNORE"
    shown["checkpoint_tag_validation_fail"] = tags == "FAIL"
    sent = value_at(given, "seq_parallel_communication_data_type", "fp32")
    shown["seq_parallel_communication_data_type"] = DTYPES[sent]
    shown["sparse_attention"] = _sparse_section(given)
    shown["monitor_config"] = get_monitor_config(given)
    defaults = {"enabled": False, "verbose": False, "prof_all": True, "debug": False, "prof_ops": []}
    log = value_at(given, "comms_logger", defaults)
    logger = {"comms_logger": ConfigSection(**log)} if log["enabled"] else {}
    shown["comms_config"] = ConfigSection(comms_logger_enabled=log["enabled"], **logger)
    return shown


def _section(values: Json, defaults: Json) -> ConfigSection:
    return ConfigSection(**{**defaults, **{key: value for key, value in values.items() if value != AUTO}})


_SHARED: Json = MappingProxyType({"block": 16, "different_layout_per_head": False})
_DIRECTION: Json = MappingProxyType({"attention": "bidirectional", "horizontal_global_attention": False})
_GLOBAL: Json = MappingProxyType({"global_block_indices": (0,), "global_block_end_indices": None})
_SPARSE_DEFAULTS: Mapping[str, Json] = MappingProxyType(
    {
        "dense": {"block": 16},
        "fixed": {
            **_SHARED,
            "num_local_blocks": 4,
            "num_global_blocks": 1,
            **_DIRECTION,
            "num_different_global_patterns": 1,
        },
        "variable": {**_SHARED, "num_random_blocks": 0, "local_window_blocks": (4,), **_GLOBAL, **_DIRECTION},
        "bigbird": {
            **_SHARED,
            "num_random_blocks": 0,
            "num_sliding_window_blocks": 3,
            "num_global_blocks": 1,
        },
        "bslongformer": {**_SHARED, "num_sliding_window_blocks": 3, **_GLOBAL},
    }
)
"""Mode of sparse attention -> its keys with DeepSpeed's defaults."""


def _sparse_section(given: Json) -> dict[str, object] | None:
    """Return the section `sparse_attention` with the defaults of its mode; None without the section."""
    section = given.get("sparse_attention")
    if not isinstance(section, Mapping):
        return None
    mode = str(section.get("mode", "fixed")).lower()
    defaults = {k: list(v) if isinstance(v, tuple) else v for k, v in _SPARSE_DEFAULTS[mode].items()}
    return {"mode": mode, **{key: section.get(key, default) for key, default in defaults.items()}}
