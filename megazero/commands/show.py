"""Print tables and numbers for people; piped output has no colors and no limit on its width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from megazero.errors import printable

_WIDE = 100_000
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(count: int) -> str:
    """Bytes in decimal units: ``999 B``, ``1.2 kB``, ``345 MB``."""
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit and size < 99.95 else f"{size:.0f} {_UNITS[unit]}"


def count_text(count: object) -> str:
    """``1,234,567``; a dash for None."""
    return "-" if count is None else f"{count:,}" if isinstance(count, int) else one_line(count)


def one_line(value: object) -> str:
    """`value` as text in one line, with control characters escaped: names may come from anyone's files."""
    return printable(str(value), kept="")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> None:
    """Print rows below the names of their columns.

    Args:
        columns: the columns' names.
        rows: the cells of each row.
        left: the number of first columns that hold text, aligned left and folded on a narrow terminal; the
            others hold numbers, aligned right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(columns):
        words = i < left
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in rows:
        table.add_row(*map(one_line, row))
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def print_facts(rows: Iterable[tuple[str, object]]) -> None:
    """Print a line per (name, value)."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {one_line(value)}".rstrip())
