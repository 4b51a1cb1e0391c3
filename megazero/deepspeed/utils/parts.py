"""`made_of`: compose a class of parts, whose members it exposes by a table of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import getattr_static
from operator import attrgetter
from types import FunctionType
from typing import TypeVar

T = TypeVar("T")

Parts = Mapping[str, tuple[type, str]]
"""Attribute that holds a part -> the part's class, and the names of its members to expose."""


def made_of(parts: Parts) -> Callable[[type[T]], type[T]]:
    """Decorate a class whose instances hold parts.

    Methods and properties of a part become members of the class, with signature and docstring. Names that the
    part's class lacks are instance attributes of the part, which the class reads and writes. A derived class
    may override members, and may have further parts by the same decorator.
    """

    def decorate(whole: type[T]) -> type[T]:
        for part, (kind, names) in parts.items():
            for name in names.split():
                member = getattr_static(kind, name, None)
                setattr(whole, name, _exposed(f"{part}.{name}", member))
        return whole

    return decorate


def _exposed(path: str, member: object) -> object:
    read = attrgetter(path)
    if isinstance(member, FunctionType):

        @wraps(member)
        def call(self: object, *args: object, **kwargs: object) -> object:
            return read(self)(*args, **kwargs)

        return call

    part, _, name = path.partition(".")

    def write(self: object, value: object) -> None:
        setattr(getattr(self, part), name, value)

    read_only = isinstance(member, property) and member.fset is None
    return property(read, None if read_only else write, doc=getattr(member, "__doc__", None))


def getter_method(name: str, path: str, doc: str) -> Callable[[object], object]:
    """A method without arguments that returns the attribute at a dotted path."""
    read = attrgetter(path)

    def get(self: object) -> object:
        return read(self)

    get.__name__, get.__doc__ = name, doc
    return get
