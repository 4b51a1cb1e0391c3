"""`PerContext`: a value per execution context (a thread, or a task), for what DeepSpeed keeps per process."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class PerContext(Generic[T]):
    """A value that is None until it is set; ranks that are threads each have their own.

    Args:
        name: its name in debuggers.
    """

    def __init__(self, name: str):
        self._variable: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """The value; None if it has not been set."""
        return self._variable.get()

    def set(self, value: T | None) -> None:
        """Set the value; None clears it."""
        self._variable.set(value)
