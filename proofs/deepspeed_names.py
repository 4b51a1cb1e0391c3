"""Which names of `deepspeed` scripts use, and what becomes of each here.

    python proofs/deepspeed_names.py [--all] SCRIPT_OR_FOLDER...

A script is read, not run: its imports of `deepspeed`, and what it asks those for. Each script that uses it
gets a line: the names that do not exist here, and those that are refused; with `--all` all others too. The
end says how many need only names that exist.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from megazero.deepspeed.surface import Surface, read_names

MODULES = Surface(read_names()).modules


def used_names(tree: ast.AST) -> frozenset[str]:
    """What a script asks `deepspeed` for, as dotted names below it: ``comm.get_rank``."""
    known: dict[str, str] = {}  # name in the script -> what it is below `deepspeed`
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head, _, below = alias.name.partition(".")
                if head == "deepspeed":
                    found.add(below)
                    known[alias.asname or head] = below if alias.asname else ""
        elif isinstance(node, ast.ImportFrom) and not node.level:
            head, _, below = (node.module or "").partition(".")
            for alias in node.names if head == "deepspeed" else ():
                name = below if alias.name == "*" else ".".join(filter(None, (below, alias.name)))
                found.add(name)
                known[alias.asname or alias.name] = name
    found.update(_chains(tree, known))
    longer = {name.rpartition(".")[0] for name in found}
    return frozenset(name for name in found if name and not (name in longer and name in MODULES))


def _chains(tree: ast.AST, known: Mapping[str, str]) -> Iterator[str]:
    """Attributes that are asked of known names, each chain at its longest."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        parts: list[str] = []
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            parts.insert(0, base.attr)
            base = base.value
        if isinstance(base, ast.Name) and base.id in known:
            yield ".".join(filter(None, (known[base.id], *parts)))


def state_of(name: str) -> str:
    """The state of a name's row; "module" if it is one, "missing" if there is neither."""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        row = MODULES.get(".".join(parts[:depth]), {}).get(part)
        if row is not None:
            return row.state
    return "module" if name in MODULES else "missing"


def scripts(places: list[str]) -> Iterator[Path]:
    """The scripts below some places."""
    for place in map(Path, places):
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]


def main() -> None:
    """Report on the scripts of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="list the names that exist, too")
    parser.add_argument("places", nargs="+")
    flags = parser.parse_args()
    users = whole = 0
    for path in scripts(flags.places):
        try:
            names = used_names(ast.parse(path.read_text(encoding="utf-8", errors="replace")))
        except SyntaxError as error:
            print(f"{path}: cannot be read: {error.msg}, line {error.lineno}")
            continue
        if not names:
            continue
        states = {name: state_of(name) for name in sorted(names)}
        bad = {name: state for name, state in states.items() if state in ("missing", "refused")}
        users, whole = users + 1, whole + ("missing" not in bad.values())
        shown = states if flags.all else bad
        print(f"{path}: {', '.join(f'{name} ({state})' for name, state in shown.items()) or 'all exist'}")
    print(f"{whole} of {users} scripts need only names that exist")


if __name__ == "__main__":
    main()
