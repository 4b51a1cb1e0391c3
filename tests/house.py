"""The core and its annexes, as docs/house.md has them; `python -m tests.house` writes its figures."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.source_tree import ROOT, Source, sources

PAGE = ROOT / "docs/house.md"
ROW = re.compile(
    r"^\| `(?P<room>[\w/*.]+)` \| (?P<lines>[\d,]+) \| (?P<what>.+?) \|(?P<sockets> .*? ?\||)$", re.M
)
SOCKET = re.compile(r"`(.+?)`")
BUDGET = re.compile(r"at most \*\*([\d,]+) lines\*\*")
TOP = "*.py"
"""The room of the modules that are in no package."""


@dataclass(frozen=True)
class Room:
    """A row of the tables. Sockets are the rooms and modules of the core that may import an annex."""

    name: str
    lines: int
    annex: bool
    sockets: tuple[str, ...]


@cache
def rooms() -> tuple[Room, ...]:
    """The rows of both tables."""
    return tuple(
        Room(
            row["room"],
            number(row["lines"]),
            bool(row["sockets"]),
            tuple(SOCKET.findall(row["sockets"])),
        )
        for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))
    )


def budget() -> int:
    """The most lines that the core may have."""
    return number(BUDGET.findall(PAGE.read_text(encoding="utf-8"))[0])


def number(text: str) -> int:
    """``1,234`` -> 1234."""
    return int(text.replace(",", ""))


def room_of(module: str) -> Room | None:
    """The room that a module of megazero is in: the one with the longest name; None outside megazero."""
    path = module.replace(".", "/").removeprefix("megazero/")
    inside = [room for room in rooms() if f"{path}/".startswith(f"{room.name}/")]
    if inside:
        return max(inside, key=lambda room: len(room.name))
    top = module == "megazero" or module.startswith("megazero.")
    return next((room for room in rooms() if room.name == TOP), None) if top and "/" not in path else None


@cache
def facades() -> dict[str, str]:
    """Each name that a package takes from a module -> the name there, both dotted."""
    return {
        f"{source.module}.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
        for source in sources("megazero")
        if source.package
        for node in source.tree.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }


def home_of(name: str) -> str:
    """A dotted name where it is at home: a facade may be of the core and show a name of an annex."""
    while name in facades() and facades()[name] != name:
        name = facades()[name]
    return name


def lines_by_room() -> Counter[str]:
    """Lines of Python in each room."""
    counts: Counter[str] = Counter()
    for source in sources("megazero"):
        room = room_of(source.module)
        counts[room.name if room else source.module] += source.text.count("\n")
    return counts


def core_lines() -> int:
    """Lines of Python in the core."""
    counts = lines_by_room()
    return sum(counts[room.name] for room in rooms() if not room.annex)


def annex_violations(source: Source) -> Iterator[str]:
    """Imports of an annex by the core, elsewhere than at a socket."""
    own = room_of(source.module)
    if own is None or own.annex:
        return
    path = source.module.replace(".", "/").removeprefix("megazero/")
    for imported in source.imports():
        room = room_of(home_of(imported.target))
        if room is None or not room.annex or own.name in room.sockets:
            continue
        if not any(f"{path}/".startswith(f"{socket}/") for socket in room.sockets):
            yield f"{source.module}:{imported.line} imports {imported.target} of the annex {room.name}"


def write() -> None:
    """Write the figures of the core's rooms, and lower the budgets that may be; one of 0 is new."""
    counts = lines_by_room()

    def counted(row: re.Match[str]) -> str:
        lines = counts[row["room"]]
        if row["sockets"]:  # an annex, whose figure is a budget
            lines = min(-(-lines // 10) * 10, number(row["lines"]) or lines)
        return row[0].replace(f"| {row['lines']} |", f"| {lines:,} |", 1)

    text = ROW.sub(counted, PAGE.read_text(encoding="utf-8"))
    least = -(-core_lines() // 100) * 100
    lowered = min(least, budget() or least)
    PAGE.write_text(BUDGET.sub(f"at most **{lowered:,} lines**", text), encoding="utf-8")


if __name__ == "__main__":
    write()
