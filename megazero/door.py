"""Doors: a module of the core offers an annex's names without importing the annex before they are used."""

from __future__ import annotations

from importlib import import_module


def through_door(room: str, name: str, annex: str, *names: str) -> object:
    """Look up an annex's name for a module's `__getattr__` (PEP 562), importing the annex now.

    Args:
        room: the module whose `__getattr__` is called.
        name: the name that is looked up.
        annex: the module that defines the names.
        names: the names that `room` offers.

    Raises:
        AttributeError: `name` is not in `names`.
    """
    if name not in names:
        raise AttributeError(f"module {room!r} has no attribute {name!r}")
    return getattr(import_module(annex), name)
