"""The modules of ``import deepspeed``, made from tables of names.

A row of ``names/*.csv`` maps a public name of DeepSpeed to its place here, and says how far it does what
DeepSpeed documents. `Surface` makes modules of the rows; a name's home is imported when the name is used.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
PATH = Path(__file__).with_name("path")
"""A folder for `sys.path` with a `deepspeed` that leads here, and the metadata of its version."""
PACKAGE = "deepspeed"
VERSION = "0.19.8"
"""The release of DeepSpeed whose documentation the names follow."""

State = Literal["same", "differs", "no effect", "refused"]


@dataclass(frozen=True)
class Name:
    """One public name of DeepSpeed.

    Attributes:
        modules: the modules that have the name, below `deepspeed`; ``.`` is `deepspeed` itself.
        name: the name; empty for a row that only makes the modules exist.
        home: ``module:attribute`` or ``module`` here; ``=text`` for a constant with that text; empty if the
            name is refused.
        state: whether it does what DeepSpeed documents.
        note: how it differs, why it has no effect, or what to do instead.
    """

    modules: tuple[str, ...]
    name: str
    home: str
    state: State
    note: str

    def value(self) -> object:
        """The object that the name stands for; for a refused name, a class that raises when it is called."""
        if self.state == "refused":
            return refused(f"{PACKAGE}.{self.modules[0]}.{self.name}".replace("..", "."), self.note)
        if self.home.startswith("="):
            return self.home[1:]
        module, _, attribute = self.home.partition(":")
        value: object = import_module(module)
        for part in attribute.split(".") if attribute else ():
            value = getattr(value, part)
        return value


class Refused(type):
    """The metaclass of refused names: calling such a class, or one derived from it, raises ConfigError.

    Attributes:
        refusal: the refused name, and what to do instead.
    """

    refusal: tuple[str, str]

    def __call__(cls, *args: object, **kwargs: object) -> None:
        """Raise ConfigError, which says what to do instead."""
        name, remedy = cls.refusal
        raise ConfigError(f"`{name}` must not be used here; {remedy}")

    def __getattr__(cls, name: str) -> Refused:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(f"{cls.refusal[0]}.{name}", cls.refusal[1])


def refused(name: str, remedy: str) -> Refused:
    """A class that stands for a refused name: scripts may import it, as they import many unused names."""
    return Refused(name.rpartition(".")[2], (), {"refusal": (name, remedy), "__doc__": f"Refused: {remedy}"})


def read_names(folder: Path = TABLES) -> tuple[Name, ...]:
    """Read the tables of a folder.

    A line holds one or several names. If its home ends in a colon, each name is appended to the home;
    ``NAME=text`` is a constant.

    Raises:
        ValueError: a line has an unknown state, or lacks its home or its note.
    """
    rows: list[Name] = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                rows += [_row(word, row) for word in row["name"].split() or [""]]
                last = rows[-1]
                if last.state not in get_args(State) or (last.state != "same" and not last.note):
                    raise ValueError(f"{path.name}: {row}")
                if last.name and not last.home and last.state != "refused":
                    raise ValueError(f"{path.name}: {row}")
    return tuple(rows)


def _row(word: str, cells: Mapping[str, Any]) -> Name:
    name, _, constant = word.partition("=")
    home = f"={constant}" if constant else cells["home"]
    home += name if home.endswith(":") else ""
    return Name(tuple(cells["modules"].split()), name, home, cells["state"], cells["note"])


class Surface(MetaPathFinder, Loader):
    """Importer of `deepspeed` and the modules below it.

    Args:
        names: the rows of the tables.
    """

    def __init__(self, names: Sequence[Name]):
        self.names = names

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, Name]]:
        """Module below `deepspeed` -> its names; the parents of a module are included."""
        modules: dict[str, dict[str, Name]] = {"": {}}
        for row in self.names:
            for path in row.modules:
                path = "" if path == "." else path
                if row.name:
                    modules.setdefault(path, {})[row.name] = row
                parts = path.split(".") if path else []
                for count in range(len(parts) + 1):
                    modules.setdefault(".".join(parts[:count]), {})
        return modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module in the tables; None for any other module."""
        head, _, below = fullname.partition(".")
        if head != PACKAGE or below not in self.modules:
            return None
        spec = ModuleSpec(fullname, self, origin=str(PATH / PACKAGE / "__init__.py"), is_package=True)
        spec.has_location = not below  # scripts ask for `deepspeed.__file__`
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a module whose names are looked up in the tables."""
        below = spec.name.partition(".")[2]
        return SurfaceModule(spec.name, self.modules[below], self._children(below), import_module)

    def as_module(self, name: str, below: str = "") -> ModuleType:
        """Make the module at `below` under another name; import statements do not find that name."""
        children = self._children(below)
        start = f"{below}." if below else ""

        def child(fullname: str) -> ModuleType:
            return self.as_module(fullname, start + fullname.rpartition(".")[2])

        return SurfaceModule(name, self.modules[below], children, child)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up when they are used."""

    def _children(self, below: str) -> frozenset[str]:
        start = f"{below}." if below else ""
        return frozenset(
            rest
            for path in self.modules
            if path.startswith(start) and (rest := path[len(start) :]) and "." not in rest
        )


class SurfaceModule(ModuleType):
    """A module of `deepspeed`, whose attributes are rows of the tables and submodules.

    Args:
        name: its full name.
        names: the rows of its names.
        children: the names of its submodules.
        child: makes a submodule, by its full name, when it is used as an attribute.
    """

    def __init__(
        self,
        name: str,
        names: Mapping[str, Name],
        children: frozenset[str],
        child: Callable[[str], ModuleType],
    ):
        super().__init__(name, f"`{name}` as megazero has it.")
        self._names, self._children, self._child = names, children, child
        self.__all__ = sorted({*names, *children})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in self._names:
            value = self._names[name].value()
            setattr(self, name, value)
            return value
        if name in self._children:
            value = self._child(f"{self.__name__}.{name}")
            setattr(self, name, value)
            return value
        raise AttributeError(
            f"module {self.__name__!r} has no attribute {name!r}: megazero knows no such name of DeepSpeed "
            f"{VERSION}; docs/initialize.md lists those that it has"
        )

    def __dir__(self) -> list[str]:
        return self.__all__

    def __reduce__(self) -> tuple[object, ...]:
        return import_module, (self.__name__,)


TOP = Surface(read_names()).as_module("megazero")
"""The module `deepspeed` for ``import megazero as deepspeed``, which works beside an installed DeepSpeed."""


def install() -> ModuleType:
    """Make ``import deepspeed`` import megazero, in this process and in processes that it starts.

    An installed DeepSpeed is hidden, its version metadata too. Further calls have no effect.

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
    if str(PATH) not in sys.path:
        sys.path.insert(1, str(PATH))  # the first is the script's own folder
    inherited = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if str(PATH) not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(PATH), *inherited])
    return import_module(PACKAGE)
