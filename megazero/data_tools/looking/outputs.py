"""What the tools that look at data share: columns, quantities, and where pictures go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megazero.errors import printable
from megazero.pictures.style import LIGHT, SUFFIXES, THEMES


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells below each other; the first and the last column are words, aligned left."""
    cells = [[printable(cell, kept="") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(widths) - 1
    for row in cells:
        sides = ("<" if i in (0, last) else ">" for i in range(len(row)))
        print("  ".join(f"{c:{side}{w}}" for c, side, w in zip(row, sides, widths, strict=True)).rstrip())


def count(text: str) -> int:
    """An argparse type: a whole number of at least 1, also as 300e9 or 1_000."""
    try:
        number = float(text)
        whole = int(number) if not text.replace("_", "").isdigit() else int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"must be a whole number, but is {text!r}") from None
    if whole < 1 or whole != number:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text}")
    return whole


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--picture FILE` and `--theme`."""
    text = f"also draw it into this file ({', '.join(SUFFIXES)}); needs matplotlib"
    parser.add_argument("--picture", type=_picture, metavar="FILE", help=text)
    parser.add_argument(
        "--theme", choices=tuple(THEMES), default=LIGHT.name, help="paper of the picture (light)"
    )


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"must end in one of {', '.join(SUFFIXES)}, but is {path.name}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must lie in a folder, but `{path.parent}` is none; make it")
    return path
