"""Sections of a JSON as objects with DeepSpeed's attributes and defaults; nothing here reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from megazero.config.deepspeed.section import AUTO
from megazero.config.deepspeed.sections.training import DTYPE_NAMES
from megazero.config.deepspeed.table import MODELS, ROWS
from megazero.deepspeed.config.sparse import sparse_section
from megazero.deepspeed.reports.monitor import get_monitor_config

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        name: {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[short]
        for name, short in DTYPE_NAMES.items()
    }
)
DEEPSPEED_OPTIMIZERS = (
    *("adagrad", "adam", "adamw", "lamb", "muadam"),
    *("muadamw", "musgd", "lion", "muon"),
)
"""DeepSpeed's own optimizers, whose names match in any case."""


class ConfigSection(SimpleNamespace):
    """A section as an object; `model_dump` and its like give it as DeepSpeed's models do."""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The section as a dictionary, sections within it likewise; options have no effect."""
        return {k: v.model_dump() if isinstance(v, ConfigSection) else v for k, v in vars(self).items()}

    dict = model_dump

    def model_dump_json(self, **options: Any) -> str:
        """The section as the text of a JSON; options are those of `json.dumps`."""
        return json.dumps(self.model_dump(), **options)


def value_at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path of a JSON's content, with or without ``stage3_``; "auto" is the default."""
    node: Any = config
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


def optimizer_name(config: Mapping[str, Any]) -> str | None:
    """The name of the JSON's optimizer, in small letters if it is one of DeepSpeed's."""
    name: str | None = value_at(config, "optimizer.type")
    small = name.lower() if isinstance(name, str) else None
    return small if small in DEEPSPEED_OPTIMIZERS else name


def autocast_dtype(given: Mapping[str, Any]) -> torch.dtype | None:
    """The type of products that `torch_autocast` names; None if it is off or names none."""
    name = value_at(given, "torch_autocast.dtype")
    on = value_at(given, "torch_autocast.enabled", False)
    return DTYPES[str(name)] if on and name is not None else None


def sections_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Attribute -> value, for all of `DeepSpeedConfig` that only shows what a JSON has.

    Args:
        given: the JSON's content.
    """
    shown: dict[str, Any] = {}
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
    shown["sparse_attention"] = sparse_section(given)
    shown["monitor_config"] = get_monitor_config(given)
    defaults = {"enabled": False, "verbose": False, "prof_all": True, "debug": False, "prof_ops": []}
    log = value_at(given, "comms_logger", defaults)
    shown["comms_config"] = ConfigSection(comms_logger_enabled=log["enabled"])
    if log["enabled"]:
        shown["comms_config"].comms_logger = ConfigSection(**log)
    return shown


def _section(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> ConfigSection:
    return ConfigSection(**{**defaults, **{key: value for key, value in given.items() if value != AUTO}})
