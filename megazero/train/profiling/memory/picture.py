"""Memory over a step as a picture: a stacked area by what it holds, with the actions below."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.pictures import new_figure
from megazero.train.profiling.memory.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, as in `memory-report`.
_COLOURS = MappingProxyType(
    {
        "weights": "#0072B2",
        "masters": "#56B4E9",
        "moments": "#009E73",
        "gradients": "#E69F00",
        "buffers": "#999999",
        "activations": "#D55E00",
    }
)
_ACTIONS = MappingProxyType({"forward": "#56B4E9", "backward": "#E69F00", "update": "#009E73"})
_POINTS = 1500  # of the picture's width


def draw_timeline(timeline: Timeline, title: str, path: Path, suffix: str) -> None:
    """Draw a timeline into a file, in the format of `suffix`."""
    timeline_figure(timeline, title).savefig(path, dpi=120, format=suffix)


def timeline_figure(timeline: Timeline, title: str) -> Figure:
    """The picture that `draw_timeline` writes."""
    figure = new_figure(10, 5)
    panel, below = figure.subplots(2, 1, sharex=True, height_ratios=(12, 1))
    at = _thinned(timeline)
    times = [1e3 * timeline.times[i] for i in at]
    largest = max(sum(timeline.held[i].values()) for i in at)
    scale, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    kinds = timeline.kinds
    layers = [[timeline.held[i].get(kind, 0) / scale for i in at] for kind in kinds]
    colours = [_COLOURS.get(kind, "#CC79A7") for kind in kinds]
    panel.stackplot(times, layers, labels=kinds, colors=colours, step="post", linewidth=0)
    peak = timeline.peak()
    when, most = 1e3 * timeline.times[peak], sum(timeline.held[peak].values()) / scale
    panel.annotate(
        f"{most:.1f} {unit}, {timeline.doing(timeline.times[peak])}",
        (when, most),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center" if 0.2 < when / (times[-1] or 1) < 0.8 else "left" if when < times[-1] / 2 else "right",
        fontsize=8,
    )
    panel.plot([when], [most], "v", color="black", markersize=5)
    panel.set_ylim(0, 1.12 * most)
    panel.set_ylabel(unit)
    panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)
    for begin, end, name in timeline.actions:
        colour = next((c for word, c in _ACTIONS.items() if name.startswith(word)), "#999999")
        below.axvspan(1e3 * begin, 1e3 * end, color=colour, linewidth=0)
        panel.axvline(1e3 * end, color="white", linewidth=0.4, alpha=0.6)
    below.set_yticks([])
    below.set_xlabel("ms since the step began; below: forward blue, backward orange, update green")
    below.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False)
    return figure


def _thinned(timeline: Timeline) -> list[int]:
    """At most `_POINTS` points: the one with the most bytes of each of as many shares, and the ends."""
    count = len(timeline.times)
    if count <= _POINTS:
        return list(range(count))
    edges = [count * i // _POINTS for i in range(_POINTS + 1)]
    totals = [sum(held.values()) for held in timeline.held]
    most = [max(range(a, b), key=totals.__getitem__) for a, b in itertools.pairwise(edges)]
    return sorted({0, *most, count - 1})
