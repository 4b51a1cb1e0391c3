"""megazero: 3D-parallel pretraining of GPT and BERT, the same numbers on any layout.

The names that a DeepSpeed script uses are here as well: `initialize`, `init_distributed`,
`add_config_arguments`, `zero.Init`, `zero.GatheredParameters`. They are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

__version__ = "0.1.0"

_PUBLIC = MappingProxyType(
    {
        "initialize": "megazero.train.user.initialize",
        "init_distributed": "megazero.train.user.initialize",
        "add_config_arguments": "megazero.train.user.initialize",
        "RepeatingLoader": "megazero.train.user.data",
    }
)
"""Name -> the module that has it."""


def __getattr__(name: str) -> Any:
    if name == "zero":
        return import_module("megazero.zero")
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'megazero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC, "zero"]
