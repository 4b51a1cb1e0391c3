"""Tables of modules' profiles: the largest types at each depth, and every module with its shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from megazero.account.profilers.flops.counter import ModuleProfile
from megazero.account.profilers.flops.units import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    params_to_string,
)

_COLUMNS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {"params": params_to_string, "macs": macs_to_string, "duration": duration_to_string}
)


@dataclass(frozen=True)
class ModuleRow:
    """A module in the tables.

    Attributes:
        name: the dotted name; empty for the model itself.
        kind: the class's name.
        profile: the module's figures.
        marked: whether figures come from shapes, because the counter cannot see the module's kernel.
    """

    name: str
    kind: str
    profile: ModuleProfile = field(default_factory=ModuleProfile)
    marked: bool = False

    @property
    def depth(self) -> int:
        """The number of modules that contain this one."""
        return self.name.count(".") + bool(self.name)

    def as_json(self) -> list[object]:
        """The row as JSON, which `from_json` reads."""
        return [self.name, self.kind, vars(self.profile), self.marked]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> ModuleRow:
        """Parse the list that `as_json` returned."""
        name, kind, profile, marked = values
        return cls(name, kind, ModuleProfile(**profile), marked)


def rows_of(model: nn.Module, profiles: Mapping[nn.Module, ModuleProfile]) -> list[ModuleRow]:
    """A row for each module of a model that has a profile."""
    return [
        ModuleRow(name, type(module).__name__, profiles[module])
        for name, module in model.named_modules()
        if module in profiles
    ]


def largest_types(rows: Sequence[ModuleRow], module_depth: int = -1, top_modules: int = 1) -> list[str]:
    """List the types of modules with the most parameters, MACs and time at each depth."""
    depths: dict[int, dict[str, ModuleProfile]] = {}
    for row in rows:
        total = depths.setdefault(row.depth, {}).setdefault(row.kind, ModuleProfile())
        total.params += row.profile.params
        total.macs += row.profile.macs
        total.duration += row.profile.duration
    deepest = max(depths, default=0) if module_depth == -1 else module_depth
    lines = [f"the {top_modules} largest types of modules at each depth"]
    for depth, kinds in sorted(depths.items()):
        if depth > deepest:
            break
        lines.append(f"depth {depth}:")
        for column, show in _COLUMNS.items():
            largest = sorted(kinds.items(), key=lambda item: getattr(item[1], column), reverse=True)
            shown = {name: show(getattr(own, column)) for name, own in largest[:top_modules]}
            lines.append(f"    {column:<12}{shown}")
    return lines


def module_tree(rows: Sequence[ModuleRow], total: ModuleProfile, module_depth: int = -1) -> list[str]:
    """Format a line for each module down to `module_depth`: its figures, and their shares of `total`."""
    lines = ["each module: parameters, MACs, time, FLOPS"]
    for row in rows:
        if module_depth != -1 and row.depth > module_depth:
            continue
        parts = []
        for column, show in _COLUMNS.items():
            part, whole = getattr(row.profile, column), getattr(total, column)
            parts.append(f"{show(part)} = {100 * part / (whole or 1):.3g}%")
        rate = row.profile.flops / row.profile.duration if row.profile.duration else 0
        mark = " *" if row.marked else ""
        name = f"{'  ' * row.depth}{row.name or 'model'} ({row.kind})"
        lines.append(f"{name}: {', '.join((*parts, flops_to_string(rate)))}{mark}")
    return lines
