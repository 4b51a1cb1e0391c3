"""A DeepSpeed JSON from key paths, read."""

from __future__ import annotations

from typing import Any

from megazero.config.deepspeed.read import DeepSpeedSettings, read_deepspeed


def document(values: dict[str, Any]) -> dict[str, Any]:
    """Key path -> value as nested sections."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def read(values: dict[str, Any], **rest: Any) -> DeepSpeedSettings:
    return read_deepspeed(document(values), **{"data_parallel": 4, **rest})
