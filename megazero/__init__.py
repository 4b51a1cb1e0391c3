"""megazero: 3D-parallel pretraining of GPT and BERT, with the same numbers on any layout.

The names that a DeepSpeed script uses are here too: `initialize`, `init_distributed`,
`add_config_arguments`, `zero.Init`, `zero.GatheredParameters`, `moe.layer.MoE`, `moe.utils`. They are
imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megazero.version import VERSION

__version__ = VERSION

_FROM_DEEPSPEED = ("RepeatingLoader", "add_config_arguments", "init_distributed", "initialize")


def __getattr__(name: str) -> Any:
    if name in ("moe", "zero"):
        return import_module(f"megazero.{name}")
    if name in _FROM_DEEPSPEED:
        return getattr(import_module("megazero.deepspeed"), name)
    raise AttributeError(f"module 'megazero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_FROM_DEEPSPEED, "moe", "zero"]
