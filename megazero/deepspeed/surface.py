"""The names that scripts import from `deepspeed`, each a row of a table, as modules made of those rows.

``names/*.csv`` says of each public name of DeepSpeed where it lives here and how far it does what is
documented there. `Surface` makes modules of the rows; nothing is imported before a name is asked for.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""A folder for `sys.path` that holds `deepspeed`, which leads here, and what tells installers its version."""
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
        home: ``module:attribute`` of what it is here, or ``module`` alone; ``=`` and a word for a constant,
            which is that word; empty if it is refused.
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
        if self.home.startswith("="):
            return self.home[1:]
        module, _, attribute = self.home.partition(":")
        value: Any = import_module(module)
        for part in attribute.split(".") if attribute else ():
            value = getattr(value, part)
        return value


class Refused(type):
    """The class of what is refused: neither it nor a class derived from it can be made or called.

    Attributes:
        refusal: the sentence that says so.
    """

    refusal: tuple[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> None:
        """Say what to do instead."""
        name, remedy = cls.refusal
        raise ConfigError(f"`{name}` must not be used here; {remedy}")

    def __getattr__(cls, name: str) -> Refused:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(f"{cls.refusal[0]}.{name}", cls.refusal[1])


def refused(name: str, remedy: str) -> Refused:
    """A stand-in for a name that is refused: scripts import many that they never use."""
    return Refused(name.rpartition(".")[2], (), {"refusal": (name, remedy), "__doc__": f"Refused: {remedy}"})


def read_names(folder: Path = TABLES) -> tuple[Name, ...]:
    """The rows of all tables of a folder.

    A line is for all names in its cell: a home that ends in a colon has each under its own name, and
    ``NAME=word`` is a constant.

    Raises:
        ValueError: a row has no such state, or lacks its home or its note.
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
        spec = ModuleSpec(fullname, self, origin=str(PATH / PACKAGE / "__init__.py"), is_package=True)
        spec.has_location = not below  # scripts ask for `deepspeed.__file__`
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module whose names are looked up in the table."""
        below = spec.name.partition(".")[2]
        return SurfaceModule(spec.name, self.modules[below], self._children(below), import_module)

    def as_module(self, name: str, below: str = "") -> ModuleType:
        """The same module under another name, which no import statement finds, nor those below it."""
        children = self._children(below)
        start = f"{below}." if below else ""

        def child(fullname: str) -> ModuleType:
            return self.as_module(fullname, start + fullname.rpartition(".")[2])

        return SurfaceModule(name, self.modules[below], children, child)

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
    """A stand-in for `deepspeed.NAME`, whose attributes come from rows of `names/` and further modules.

    Args:
        name: its full name.
        names: its names.
        children: the modules below it.
        child: gives one of them by its full name, when it is asked for as an attribute.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)


TOP = Surface(read_names()).as_module("megazero")
"""The names right in `deepspeed`, for ``import megazero as deepspeed``; there may be another `deepspeed`."""


def install() -> ModuleType:
    """Make ``import deepspeed`` mean megazero in this process and in those that it starts.

    Its modules and its version are found as if it were installed; a DeepSpeed that is installed stays unseen.
    Calling it again changes nothing.

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
    inherited = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    if str(PATH) not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(PATH), *inherited])
    return import_module(PACKAGE)
