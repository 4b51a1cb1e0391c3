"""A door to DeepSpeed's `MoE` under its upstream path, `moe.layer.MoE`."""

from __future__ import annotations

from typing import Any

from megazero.door import through_door


def __getattr__(name: str) -> Any:
    return through_door(__name__, name, "megazero.deepspeed.moe.layer", "MoE")
