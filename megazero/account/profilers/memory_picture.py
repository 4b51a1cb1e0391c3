"""Pictures of memory over a step. In all pictures of memory, a kind has the same color."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.account.memory import KINDS
from megazero.account.profilers.comms_table import size_text
from megazero.account.profilers.timeline import MemoryHistory
from megazero.pictures.style import Theme, name_level, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SERIES = MappingProxyType(dict(zip((*KINDS, "other"), (0, 5, 2, 1, 4, 3, 6), strict=True)))
_SHADES = MappingProxyType({"forward": "faint", "backward": "muted", "update": "ink"})
_POINTS = 800  # drawn over the picture's width
_FARTHEST = 4  # a room that is so many times the peak is named, but not drawn to scale


def kind_color(kind: str, theme: Theme) -> str:
    """The color of a kind of memory on a theme's paper."""
    return theme.series[_SERIES.get(kind, _SERIES["other"])]


def kind_legend(figure: Figure, kinds: Iterable[str], theme: Theme, more: Sequence[str] = ()) -> None:
    """Add a legend of kinds in their order, and of `more` words of the shades of actions."""
    from matplotlib.patches import Patch

    present = sorted(set(kinds), key=list(_SERIES).index)
    handles = [Patch(color=kind_color(kind, theme), label=kind) for kind in present]
    handles += [Patch(color=getattr(theme, _SHADES[word]), label=word) for word in more]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.2)


def draw_memory(
    panels: Sequence[Axes], histories: Sequence[MemoryHistory], room: int | None, theme: Theme
) -> float:
    """Draw stacked areas of kinds over a step, one history a panel, and the room of a device if it is known.

    The peak has a mark, and its size and moment stand above. Returns the seconds of the axis's unit of time.
    """
    most = max(sum(held.alive[held.peak()].values()) for held in histories)
    unit, scale = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    time, second = ("s", 1.0) if max(held.ends for held in histories) >= 1 else ("ms", 1e-3)
    near = room is not None and room <= _FARTHEST * most
    for panel, held in zip(panels, histories, strict=True):
        at, when = held.envelope(_POINTS), held.times[held.peak()]
        layers = [[held.alive[i].get(kind, 0) / scale for i in at] for kind in held.kinds]
        colors = [kind_color(kind, theme) for kind in held.kinds]
        times = [held.times[i] / second for i in at]
        panel.stackplot(times, layers, labels=held.kinds, colors=colors, step="post", linewidth=0)
        peak = sum(held.alive[held.peak()].values()) / scale
        panel.scatter([when / second], [1.04 * peak], marker="v", s=28, color=theme.ink, zorder=3)
        words = f"▼ {peak:,.1f} {unit} at {when / second:,.4g} {time}, {held.doing(when)}"
        words += f"; room of the device: {size_text(room)} ↑" if room is not None and not near else ""
        panel.set_title(words, loc="right", fontsize=8.5)
        panel.set(xlim=(0, held.ends / second), ylim=(0, 1.12 * most / scale), ylabel=f"memory ({unit})")
        if room is not None and near:
            panel.set_ylim(0, 1.25 * max(most, room) / scale)
            name_level(panel, room / scale, f"room of the device: {size_text(room)}")
    panels[-1].set_xlabel(f"time since the step began ({time})")
    return second


def timeline_figure(
    held: MemoryHistory, title: str, subtitle: str, theme: Theme, room: int | None = None
) -> Figure:
    """Draw the memory of a step with the executor's actions below; it is called within `styled`."""
    figure = new_figure(title, subtitle, height=4.6)
    panel, below = figure.subplots(2, 1, sharex=True, height_ratios=(12, 1))
    second = draw_memory([panel], [held], room, theme)
    below.set_xlabel(panel.get_xlabel())
    panel.set_xlabel("")
    for begin, end, name in held.actions:
        color = getattr(theme, _SHADES.get(name.partition(" ")[0], "muted"))
        box = (begin / second, (end - begin) / second)
        below.broken_barh([box], (0, 1), color=color, edgecolor=theme.paper, linewidth=0.4)
    below.set_yticks([])
    below.grid(visible=False)
    below.spines[:].set_visible(False)
    kind_legend(figure, held.kinds, theme, tuple(_SHADES))
    return figure
