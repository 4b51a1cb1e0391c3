"""megazero: 3D-parallel pretraining of GPT and BERT, with the same numbers on any layout.

The names that a DeepSpeed script uses are here too, from `initialize` to `zero.Init`: such a script may say
``import megazero as deepspeed``. They are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megazero.version import VERSION

__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name in ("moe", "zero"):
        return import_module(f"megazero.{name}")
    if name.startswith("__") or find_spec(f"megazero.{name}") is not None:  # for the import system to find
        raise AttributeError(f"module 'megazero' has no attribute {name!r}")
    return getattr(_names(), name)


def __dir__() -> list[str]:
    return [*globals(), *dir(_names()), "moe", "zero"]


def _names() -> object:
    return import_module("megazero.deepspeed.surface").TOP
