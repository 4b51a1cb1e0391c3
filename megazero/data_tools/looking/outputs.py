"""The parts that tools share which look at data: columns, quantities, pictures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.errors import printable
from megazero.pictures.style import LIGHT, SUFFIXES, THEMES, Theme, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells below each other; the first and the last column are words, aligned left."""
    cells = [[printable(cell, kept="") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        sides = "<" + ">" * (len(row) - 2) + "<"
        print("  ".join(f"{c:{side}{w}}" for c, side, w in zip(row, sides, widths, strict=True)).rstrip())


def count(text: str) -> int:
    """An argparse type: a whole number of at least 1, also as 300e9."""
    try:
        number = int(text) if text.isdigit() else int(float(text))
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text!r}")
    return number


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, `--picture FILE` and `--theme`."""
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object instead of a table")
    text = f"also draw it ({', '.join(SUFFIXES)}; needs matplotlib)"
    add("--picture", type=_picture, metavar="FILE", help=text)
    add("--theme", choices=tuple(THEMES), default=LIGHT.name, help="paper of the picture (light)")


def present(
    facts: dict[str, Any],
    args: argparse.Namespace,
    words: Callable[[dict[str, Any]], None],
    figure: Callable[[dict[str, Any], Theme], Figure],
) -> None:
    """Print facts as words or as JSON, and draw them if asked to. Raises ConfigError without matplotlib."""
    if args.json:
        print(json.dumps(facts))
    else:
        words(facts)
    if args.picture is not None:
        theme = THEMES[args.theme]
        with styled(theme):
            save(figure(facts, theme), args.picture)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must end in {' or '.join(SUFFIXES)}, in a folder, but is {text}")
    return path
