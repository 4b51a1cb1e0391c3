"""The memory of ranks as a picture: a stacked bar per rank and place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.account.memory import KINDS
from megazero.account.profilers.memory_picture import kind_color, kind_patches
from megazero.commands.memory_report.table import PLACES, RankMemory
from megazero.pictures.labels import write_on
from megazero.pictures.style import Theme, new_figure
from megazero.plan.words import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = MappingProxyType({"device": "device", "cpu": "host", "nvme": "disk"})
_LABELLED = 0.08  # of the longest bar; shorter parts have no room for a number
_BAR, _TALLEST = 0.34, 10.0  # inches of a bar, and of all bars
_READABLE = 0.16  # inches of a bar beside which letters have room


def memory_figure(memories: Sequence[RankMemory], subtitle: str, theme: Theme) -> Figure:
    """Draw a panel per place with all ranks, over the same axis; it is called within `styled`."""
    places = [place for place in PLACES if any(memory.places.get(place) for memory in memories)]
    bar = min(_BAR, _TALLEST / (len(places) * len(memories)))
    height = 1.5 + len(places) * (0.5 + bar * len(memories))
    figure = new_figure("Memory of each rank", subtitle, height=height)
    panels = figure.subplots(len(places), 1, squeeze=False, sharex=True)[:, 0]
    longest = max(memory.total(place) for memory in memories for place in places)
    unit = shown(longest).split()[1]
    scale = 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    for place, panel in zip(places, panels, strict=True):
        _draw_place(panel, memories, place, longest, theme, written=bar >= _READABLE, scale=scale)
        apart = math.ceil(_READABLE / bar)
        names = [f"rank{'s' * (len(memory.ranks) > 1)} {memory.name}" for memory in memories[::apart]]
        panel.set_yticks(range(0, len(memories), apart), names, fontsize=8)
        panel.set_title(_TITLES[place])
    panels[-1].set_xlabel(f"memory ({unit})")
    present = [k for k in KINDS if any(k in kinds for memory in memories for kinds in memory.places.values())]
    figure.legend(handles=kind_patches(present, theme), loc="outside lower center", ncols=len(present))
    return figure


def _draw_place(
    panel: Axes, memories: Sequence[RankMemory], place: str, longest: int, theme: Theme, *, written: bool, scale: float
) -> None:
    """Draw the bars of a place; their sizes are `written` on and beside them where there is room."""
    for row, memory in enumerate(memories):
        left = 0
        for kind in KINDS:
            size, color = memory.places.get(place, {}).get(kind, 0), kind_color(kind, theme)
            panel.barh(row, size / scale, left=left / scale, height=0.72, color=color)
            if written and size > _LABELLED * longest:
                middle = (left + size / 2) / scale
                write_on(panel, (middle, row), shown(size), color, 8)
            left += size
        if written:
            panel.text((left + 0.01 * longest) / scale, row, shown(left), va="center", fontsize=8)
    panel.set_ylim(len(memories) - 0.4, -0.6)
    panel.set_xlim(0, 1.13 * longest / scale)
    panel.grid(visible=False, axis="y")
