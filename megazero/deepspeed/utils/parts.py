"""A class made of parts, which shows what they have under the names of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import getattr_static
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T")

Parts = Mapping[str, tuple[type, str]]
"""Attribute that holds a part -> the part's class, and the names under which the whole shows what it has."""


def made_of(parts: Parts) -> Callable[[type[T]], type[T]]:
    """Decorate a class whose instances hold parts.

    Methods and properties of a part are found on the whole with their signature and docstring; other names
    are attributes, which are read and written there. A class derived from the whole may override them, and
    has further parts of its own by the same decorator.
    """

    def made(whole: type[T]) -> type[T]:
        for part, (kind, names) in parts.items():
            for name in names.split():
                member = getattr_static(kind, name, None)
                setattr(whole, name, _shown(f"{part}.{name}", member))
        return whole

    return made


def _shown(path: str, member: Any) -> Any:
    read = attrgetter(path)
    if isinstance(member, FunctionType):

        @wraps(member)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return read(self)(*args, **kwargs)

        return call

    part, _, name = path.partition(".")

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    fixed = isinstance(member, property) and member.fset is None
    return property(read, None if fixed else write, doc=getattr(member, "__doc__", None))


def asked(name: str, path: str, what: str) -> Any:
    """A method of no arguments that returns what a path leads to; the docstring is `what`."""
    read = attrgetter(path)

    def ask(self: Any) -> Any:
        return read(self)

    ask.__name__, ask.__doc__ = name, what
    return ask
