"""Doors: a room of the core shows an annex's names where its users look for them, without importing it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def through_door(room: str, name: str, annex: str, *names: str) -> Any:
    """Look up a name for a module's `__getattr__` (PEP 562): the annex is imported when a name is asked for.

    Args:
        room: the module that is asked.
        name: the name that it is asked for.
        annex: the module that has the names.
        names: the names that the room shows.

    Raises:
        AttributeError: `name` is none of them.
    """
    if name not in names:
        raise AttributeError(f"module {room!r} has no attribute {name!r}")
    return getattr(import_module(annex), name)
