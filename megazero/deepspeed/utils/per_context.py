"""`PerContext`: a choice that DeepSpeed keeps for the process, kept here for each context of execution."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class PerContext(Generic[T]):
    """One value, None until it is set; ranks that are threads each have their own.

    Args:
        name: what it is, for debuggers.
    """

    def __init__(self, name: str):
        self._variable: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """The value; None if it has not been set."""
        return self._variable.get()

    def set(self, value: T | None) -> None:
        """Set the value, or forget it."""
        self._variable.set(value)
