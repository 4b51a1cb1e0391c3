"""The memory of ranks as a picture: a stacked bar per rank and place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.account.memory import KINDS
from megazero.account.profilers.timeline import COLOURS
from megazero.commands.memory_report.table import PLACES, RankMemory
from megazero.pictures import check_suffix, new_figure
from megazero.plan.words import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = MappingProxyType({"device": "device", "cpu": "host", "nvme": "disk"})
_LABELLED = 0.06  # of the longest bar; shorter parts have no room for a number


def draw_memory(memories: Sequence[RankMemory], path: Path) -> None:
    """Draw the memory of ranks into a file, in the format of its suffix. Needs matplotlib.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix is not one of `pictures.SUFFIXES`.
    """
    check_suffix(path)
    memory_figure(memories).savefig(path, dpi=120)


def memory_figure(memories: Sequence[RankMemory]) -> Figure:
    """The picture that `draw_memory` writes: a panel per place with all ranks, over the same axis."""
    places = [place for place in PLACES if any(memory.places.get(place) for memory in memories)]
    height = 1.6 + len(places) * (0.55 + 0.36 * len(memories))
    figure = new_figure(10, min(40.0, height))
    panels = figure.subplots(len(places), 1, squeeze=False, sharex=True)[:, 0]
    longest = max(memory.total(place) for memory in memories for place in places)
    unit = shown(longest).split()[1]
    scale = 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    for place, panel in zip(places, panels, strict=True):
        _draw_place(panel, memories, place, longest, scale)
        panel.set_title(_TITLES[place], loc="left", fontsize=10, fontweight="bold")
    panels[-1].set_xlabel(unit)
    present = [k for k in KINDS if any(k in kinds for memory in memories for kinds in memory.places.values())]
    boxes = [panels[0].barh([0], [0], color=COLOURS[kind]) for kind in present]
    figure.legend(boxes, present, loc="outside upper center", ncols=len(present), frameon=False)
    return figure


def _draw_place(panel: Axes, memories: Sequence[RankMemory], place: str, longest: int, scale: float) -> None:
    for row, memory in enumerate(memories):
        left = 0
        for kind in KINDS:
            size = memory.places.get(place, {}).get(kind, 0)
            panel.barh(row, size / scale, left=left / scale, height=0.7, color=COLOURS[kind])
            if size > _LABELLED * longest:
                middle = (left + size / 2) / scale
                panel.text(middle, row, shown(size), ha="center", va="center", fontsize=8, color="white")
            left += size
        panel.text((left + 0.01 * longest) / scale, row, shown(left), va="center", fontsize=8)
    names = [f"rank{'s' * (len(memory.ranks) > 1)} {memory.name}" for memory in memories]
    panel.set_yticks(range(len(memories)), names, fontsize=8)
    panel.set_ylim(len(memories) - 0.4, -0.6)
    panel.set_xlim(0, 1.12 * longest / scale)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
