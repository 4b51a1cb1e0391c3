"""The names that scripts import from `deepspeed`, each a row of a table, as modules made of those rows.

``names/*.csv`` says of each public name of DeepSpeed where it lives here and how far it does what is
documented there. `Surface` makes modules of the rows; nothing is imported before a name is asked for.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from megazero.errors import ConfigError

TABLES = Path(__file__).with_name("names")
PACKAGE = "deepspeed"
VERSION = "0.19.8"
"""The release of DeepSpeed whose documentation the names follow."""

State = Literal["same", "differs", "no effect", "refused"]


@dataclass(frozen=True)
class Name:
    """One public name of DeepSpeed.

    Attributes:
        modules: where scripts import it from, below `deepspeed`; ``.`` is `deepspeed` itself.
        name: the name there; empty for a row that only makes the module exist.
        home: ``module:attribute`` of what it is here, or ``module`` alone; empty if it is refused.
        state: same as documented there, differs, has no effect, or is refused when it is called.
        note: how it differs, why it has no effect, or what to do instead.
    """

    modules: tuple[str, ...]
    name: str
    home: str
    state: State
    note: str

    def value(self) -> Any:
        """The object of that name here; if it is refused, something that says so when it is called."""
        if self.state == "refused":
            return refused(f"{PACKAGE}.{self.modules[0]}.{self.name}".replace("..", "."), self.note)
        module, _, attribute = self.home.partition(":")
        value: Any = import_module(module)
        for part in attribute.split(".") if attribute else ():
            value = getattr(value, part)
        return value


def refused(name: str, remedy: str) -> type:
    """A class that cannot be made or called: scripts import many names that they never use."""

    def stop(*args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"`{name}` must not be used here; {remedy}")

    return type(name.rpartition(".")[2], (), {"__new__": stop, "__doc__": f"Refused: {remedy}"})


def read_names(folder: Path = TABLES) -> tuple[Name, ...]:
    """The rows of all tables of a folder.

    Raises:
        ValueError: a row has no such state, or lacks its home or its note.
    """
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                cells: dict[str, Any] = {**row, "modules": tuple(row["modules"].split())}
                name = Name(**cells)
                if name.state not in get_args(State) or (name.state != "same" and not name.note):
                    raise ValueError(f"{path.name}: {row}")
                if name.name and not name.home and name.state != "refused":
                    raise ValueError(f"{path.name}: {row}")
                rows.append(name)
    return tuple(rows)


class Surface(MetaPathFinder, Loader):
    """Finds `deepspeed` and its modules in the table.

    Args:
        names: the table.
    """

    def __init__(self, names: Sequence[Name]):
        self.names = names

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, Name]]:
        """Module below `deepspeed` -> its names. A module's parents exist too."""
        modules: dict[str, dict[str, Name]] = {"": {}}
        for row in self.names:
            for path in row.modules:
                path = "" if path == "." else path
                if row.name:
                    modules.setdefault(path, {})[row.name] = row
                for parent in _parents(path):
                    modules.setdefault(parent, {})
        return modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table; None for every other."""
        head, _, below = fullname.partition(".")
        if head != PACKAGE or below not in self.modules:
            return None
        return ModuleSpec(fullname, self, origin=str(TABLES), is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module whose names are looked up in the table."""
        below = spec.name.partition(".")[2]
        return SurfaceModule(spec.name, self.modules[below], self._children(below))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its names are looked up when they are asked for."""

    def _children(self, below: str) -> frozenset[str]:
        start = f"{below}." if below else ""
        return frozenset(
            rest
            for path in self.modules
            if path.startswith(start) and (rest := path[len(start) :]) and "." not in rest
        )


def _parents(path: str) -> Iterable[str]:
    parts = path.split(".") if path else []
    return (".".join(parts[:count]) for count in range(len(parts) + 1))


class SurfaceModule(ModuleType):
    """A module of DeepSpeed's: rows of the table and further modules.

    Args:
        name: its full name.
        names: its names.
        children: the modules below it, which are imported when they are asked for as attributes.
    """

    def __init__(self, name: str, names: Mapping[str, Name], children: frozenset[str]):
        super().__init__(name, f"`{name}` as megazero has it.")
        self._names, self._children = names, children
        self.__all__ = sorted({*names, *children})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in self._names:
            value = self._names[name].value()
            setattr(self, name, value)
            return value
        if name in self._children:
            return import_module(f"{self.__name__}.{name}")
        raise AttributeError(
            f"module {self.__name__!r} has no attribute {name!r}: megazero knows no such name of DeepSpeed "
            f"{VERSION}; docs/initialize.md lists those that it has"
        )

    def __dir__(self) -> list[str]:
        return self.__all__


def install() -> ModuleType:
    """Make ``import deepspeed`` mean megazero in this process; calling it again changes nothing.

    Returns:
        The module `deepspeed`.

    Raises:
        ConfigError: another `deepspeed` has been imported already.
    """
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None and not isinstance(loaded, SurfaceModule):
        raise ConfigError(
            f"`deepspeed` must not be imported before megazero stands in for it, but {loaded.__file__} is; "
            "call `install` first, or start the script with `megazero run`"
        )
    if not any(isinstance(finder, Surface) for finder in sys.meta_path):
        sys.meta_path.insert(0, Surface(read_names()))
    return import_module(PACKAGE)
