"""A view of a configuration without the fields that could not be read, so that rules can judge the rest."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import FunctionType, MethodType
from typing import cast

from megazero.config.fields import SECTIONS
from megazero.config.tree.config import Config
from megazero.config.tree.option import Section


class Unsound(Exception):
    """A field was read whose value is not to be trusted."""


class _SoundSection:
    """A section without some of its fields; its properties and methods are computed from the others."""

    def __init__(self, section: Section, name: str, broken: Set[str]) -> None:
        self._section, self._name, self._broken = section, name, broken

    def __getattr__(self, name: str) -> object:
        if f"{self._name}.{name}" in self._broken:
            raise Unsound(f"{self._name}.{name}")
        # What is computed must read through this view too, so that a broken field is noticed.
        member = getattr(type(self._section), name, None)
        if isinstance(member, property) and member.fget is not None:
            return member.fget(self)
        return MethodType(member, self) if isinstance(member, FunctionType) else getattr(self._section, name)


class _SoundTree:
    """A configuration of which some sections may be missing."""

    def __init__(self, sections: Mapping[str, _SoundSection]) -> None:
        self._sections = sections

    def __getattr__(self, name: str) -> _SoundSection:
        if name in SECTIONS and name not in self._sections:
            raise Unsound(name)
        return self._sections[name]


def sound_part(sections: Mapping[str, Section], broken: Set[str] = frozenset()) -> Config:
    """View some sections as a configuration.

    Reading another section, or a field whose path is in `broken`, raises Unsound. So a rule need not say
    beforehand which fields it reads.
    """
    parts = {name: _SoundSection(section, name, broken) for name, section in sections.items()}
    return cast("Config", _SoundTree(parts))
