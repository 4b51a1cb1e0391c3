"""Pictures of memory over a step. In all pictures of memory, a kind has the same color."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.account.memory import KINDS
from megazero.account.profilers.comms_table import size_text
from megazero.account.profilers.timeline import MemoryHistory
from megazero.pictures.style import Theme, name_level, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_SERIES = MappingProxyType(dict(zip((*KINDS, "other"), (0, 5, 2, 1, 4, 3, 6), strict=True)))
_SHADES = MappingProxyType({"forward": "faint", "backward": "muted", "update": "ink"})
_POINTS = 800  # drawn over the picture's width
_FARTHEST = 4  # a room that is so many times the peak is named, but not drawn to scale
_HEADROOM = 1.25  # above the peak or the room, for a line's name


def kind_color(kind: str, theme: Theme) -> str:
    """The color of a kind of memory on a theme's paper."""
    return theme.series[_SERIES.get(kind, _SERIES["other"])]


@dataclass(frozen=True)
class Scale:
    """The units of a picture's axes, and the sizes of these units in seconds and bytes."""

    time: str
    seconds: float
    size: str
    nbytes: int

    @classmethod
    def of(cls, seconds: float, nbytes: int) -> Scale:
        """The scale of a picture of so many seconds and bytes."""
        time, unit = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3)
        return cls(time, unit, *(("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)))


def draw_held(panel: Axes, held: MemoryHistory, scale: Scale, theme: Theme, name: str = "") -> None:
    """Draw a stacked area of the kinds over a step, and mark the peak, whose moment is in the title."""
    at = held.envelope(_POINTS)
    times = [held.times[i] / scale.seconds for i in at]
    layers = [[held.alive[i].get(kind, 0) / scale.nbytes for i in at] for kind in held.kinds]
    colors = [kind_color(kind, theme) for kind in held.kinds]
    panel.stackplot(times, layers, labels=held.kinds, colors=colors, step="post", linewidth=0)
    when = held.times[held.peak()]
    most = sum(held.alive[held.peak()].values()) / scale.nbytes
    panel.scatter([when / scale.seconds], [1.04 * most], marker="v", s=28, color=theme.ink, zorder=3)
    panel.set_title(name)
    moment = f"{when / scale.seconds:,.4g} {scale.time}, {held.doing(when)}"
    panel.set_title(f"▼ {most:,.1f} {scale.size} at {moment}", loc="right", fontsize=8.5)
    panel.set_ylabel(f"memory ({scale.size})")


def name_room(panels: Sequence[Axes], most: int, room: int | None, scale: Scale) -> None:
    """Scale panels of memory to the peak `most` and, if a device has `room` bytes, draw or name them."""
    if room is None:
        panels[0].set_ylim(0, 1.12 * most / scale.nbytes)
        return
    name = f"room of the device: {size_text(room)}"
    near = room <= _FARTHEST * most
    panels[0].set_ylim(0, _HEADROOM * (max(most, room) if near else most) / scale.nbytes)
    for panel in panels:
        if near:
            name_level(panel, room / scale.nbytes, name)
        else:
            panel.annotate(
                f"↑ {name}", (1, 1), (-2, -2), "axes fraction", "offset points", ha="right", va="top", fontsize=8.5
            )


def kind_patches(kinds: Iterable[str], theme: Theme) -> list[Patch]:
    """The patches of a legend of kinds."""
    from matplotlib.patches import Patch

    return [Patch(color=kind_color(kind, theme), label=kind) for kind in kinds]


def timeline_figure(
    held: MemoryHistory, title: str, subtitle: str, theme: Theme, room: int | None = None
) -> Figure:
    """Draw the memory of a step with the executor's actions below; it is called within `styled`."""
    from matplotlib.patches import Patch

    figure = new_figure(title, subtitle, height=4.6)
    panel, below = figure.subplots(2, 1, sharex=True, height_ratios=(12, 1))
    most = sum(held.alive[held.peak()].values())
    scale = Scale.of(held.ends, most)
    draw_held(panel, held, scale, theme)
    name_room([panel], most, room, scale)
    _draw_actions(below, held, scale, theme)
    below.set_xlabel(f"time since the step began ({scale.time})")
    shades = [Patch(color=getattr(theme, shade), label=word) for word, shade in _SHADES.items()]
    panel.set_xlim(0, held.ends / scale.seconds)
    panel.legend(
        handles=kind_patches(held.kinds, theme),
        loc="lower left",
        bbox_to_anchor=(0, 1.07),
        borderaxespad=0,
        ncols=len(held.kinds),
    )
    figure.legend(handles=shades, loc="outside lower center", ncols=len(shades))
    return figure


def _draw_actions(panel: Axes, held: MemoryHistory, scale: Scale, theme: Theme) -> None:
    for begin, end, name in held.actions:
        word = name.partition(" ")[0]
        color = getattr(theme, _SHADES.get(word, "muted"))
        box = (begin / scale.seconds, (end - begin) / scale.seconds)
        panel.broken_barh([box], (0, 1), color=color, edgecolor=theme.paper, linewidth=0.4)
    panel.set_ylim(0, 1)
    panel.set_yticks([])
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)
