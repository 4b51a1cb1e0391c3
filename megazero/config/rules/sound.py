"""A view of a configuration that has lost some of its fields, for rules that judge what is left of it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import FunctionType, MethodType
from typing import Any, cast

from megazero.config.fields import SECTIONS
from megazero.config.tree.config import Config
from megazero.config.tree.option import Section


class Unsound(Exception):
    """A field was read whose value is not to be trusted."""


class _Part:
    """A section without some of its fields. What it computes from its fields is computed from those left."""

    def __init__(self, section: Section, name: str, broken: Set[str]) -> None:
        self._section, self._name, self._broken = section, name, broken

    def __getattr__(self, name: str) -> Any:
        if f"{self._name}.{name}" in self._broken:
            raise Unsound(f"{self._name}.{name}")
        member = getattr(type(self._section), name, None)
        if isinstance(member, property) and member.fget is not None:
            return member.fget(self)
        return MethodType(member, self) if isinstance(member, FunctionType) else getattr(self._section, name)


class _Tree:
    """A configuration of which some sections may be missing."""

    def __init__(self, parts: Mapping[str, _Part]) -> None:
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        if name in SECTIONS and name not in self._parts:
            raise Unsound(name)
        return self._parts[name]


def sound_part(sections: Mapping[str, Section], broken: Set[str] = frozenset()) -> Config:
    """Return the configuration that these sections are, or are a part of.

    Reading another section of it, or a field whose path is in `broken`, raises Unsound, wherever it is read:
    so nothing needs to say beforehand which fields it depends on.
    """
    parts = {name: _Part(section, name, broken) for name, section in sections.items()}
    return cast("Config", _Tree(parts))
