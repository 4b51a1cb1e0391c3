"""Write docs/initialize.md from the table of names: ``python scripts/names_page.py docs``."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from megazero.deepspeed.surface import VERSION, Name, State, read_names

_INTRODUCTION = f"""\
# Names of DeepSpeed

<!-- Written by `python scripts/names_page.py docs`; do not edit. -->

Every name that a script may import from `deepspeed` {VERSION} and finds here, when it runs under
`megazero run` or has called `megazero.deepspeed.install()`. How to start, and what changes for whom:
[Coming from DeepSpeed](guides/coming_from_deepspeed.md).

| State | What it means |
|---|---|
| same | does what DeepSpeed's documentation says |
| differs | does it, but for what the note says |
| no effect | may be called or set, and changes nothing, for the reason in the note |
| refused | can be imported; an error says when it is called what to do instead |

A name that is found in several modules is listed with the first of them. A module that has rows here can be
imported, and so can those above it."""


def names_page(rows: Sequence[Name]) -> str:
    """Return the page: a table of names for each module directly below `deepspeed`."""
    counts = Counter(row.state for row in rows if row.name)
    total = ", ".join(f"{counts[state]} {state}" for state in get_args(State))
    lines = [_INTRODUCTION, "", f"{sum(counts.values())} names: {total}."]
    for group, members in sorted(_groups(rows).items()):
        title = f"deepspeed.{group}" if group else "deepspeed"
        lines += ["", f"## `{title}`", "", "| Name | Also in | State | Note |", "|---|---|---|---|"]
        lines += [_line(row) for row in sorted(members, key=lambda row: (row.modules[0], row.name))]
    return "\n".join(lines) + "\n"


def _groups(rows: Iterable[Name]) -> dict[str, list[Name]]:
    groups = defaultdict(list)
    for row in rows:
        if row.name:
            groups[row.modules[0].partition(".")[0]].append(row)
    return groups


def _line(row: Name) -> str:
    first, *others = (module.removeprefix(".") for module in row.modules)
    name = f"{first}.{row.name}" if first else row.name
    also = ", ".join(f"`{module or 'deepspeed'}`" for module in others)
    return f"| `{name}` | {also} | {row.state} | {row.note.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs") / "initialize.md"
    page.write_text(names_page(read_names()), encoding="utf-8")
    print(page)
