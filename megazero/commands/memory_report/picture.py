"""The memory of ranks as a picture: a stacked bar per rank and place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.account.memory import KINDS
from megazero.account.profilers.memory_picture import kind_color, kind_legend
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
    apart = math.ceil(_READABLE / bar)
    named = range(0, len(memories), apart)
    names = [f"rank{'s' * (len(memories[row].ranks) > 1)} {memories[row].name}" for row in named]
    for place, panel in zip(places, panels, strict=True):
        sizes = {kind: [memory.places.get(place, {}).get(kind, 0) for memory in memories] for kind in KINDS}
        _draw_bars(panel, sizes, longest if apart == 1 else None, scale, theme)
        panel.set_xlim(0, 1.13 * longest / scale)
        panel.set_ylim(len(memories) - 0.4, -0.6)
        panel.set_yticks(named, names, fontsize=8)
        panel.grid(visible=False, axis="y")
        panel.set_title(_TITLES[place])
    panels[-1].set_xlabel(f"memory ({unit})")
    present = [kind for memory in memories for kinds in memory.places.values() for kind in kinds]
    kind_legend(figure, present, theme)
    return figure


def _draw_bars(
    panel: Axes, sizes: Mapping[str, Sequence[int]], longest: int | None, scale: float, theme: Theme
) -> None:
    """Draw stacked bars, with sizes where there is room beside the `longest`, or nowhere if it is None."""
    left = [0] * len(next(iter(sizes.values())))
    for kind, parts in sizes.items():
        color, starts = kind_color(kind, theme), [start / scale for start in left]
        if any(parts):
            panel.barh(range(len(parts)), [part / scale for part in parts], 0.72, starts, color=color)
        for row, part in enumerate(parts):
            if longest is not None and part > _LABELLED * longest:
                write_on(panel, (left[row] + part / 2) / scale, row, shown(part), color, 8)
            left[row] += part
    for row, total in enumerate(left):
        if longest is not None:
            panel.text((total + 0.01 * longest) / scale, row, shown(total), va="center", fontsize=8)
