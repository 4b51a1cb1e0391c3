"""The bytes that are alive over a step, by kind, and a picture of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.account.memory import KINDS
from megazero.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, whose colours people with any colour vision can distinguish.
COLOURS = MappingProxyType(
    dict(zip(KINDS, ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#999999", "#D55E00"), strict=True))
)
"""The colour of each kind of memory in pictures."""

_ACTIONS = MappingProxyType({"forward": "#56B4E9", "backward": "#E69F00", "update": "#009E73"})
_POINTS = 1500  # drawn over the picture's width


@dataclass
class MemoryHistory:
    """The bytes that are alive over a step.

    Attributes:
        times: seconds since the step began, in order.
        alive: bytes by kind at each time.
        actions: (begin, end, name) of the executor's actions, in seconds.
    """

    times: list[float] = field(default_factory=list)
    alive: list[Mapping[str, int]] = field(default_factory=list)
    actions: list[tuple[float, float, str]] = field(default_factory=list)

    def add(self, seconds: float, alive: Mapping[str, int]) -> None:
        """Add a point."""
        self.times.append(seconds)
        self.alive.append(dict(alive))

    @property
    def kinds(self) -> list[str]:
        """The kinds that hold anything, in the order of `KINDS`."""
        names = {kind for alive in self.alive for kind, size in alive.items() if size}
        return [*(kind for kind in KINDS if kind in names), *sorted(names.difference(KINDS))]

    def peak(self) -> int:
        """The index of the point with the most bytes."""
        return max(range(len(self.alive)), key=lambda at: sum(self.alive[at].values()))

    def doing(self, seconds: float) -> str:
        """The name of the action at a time."""
        names = [name for begin, end, name in self.actions if begin <= seconds <= end]
        return names[0] if names else "between actions"

    def events(self, rank: int) -> list[dict[str, object]]:
        """The timeline as events of a Chrome trace: counters by kind, and a range for each action."""
        kinds = self.kinds
        counters = [
            {
                "ph": "C",
                "name": "bytes",
                "pid": rank,
                "ts": 1e6 * at,
                "args": {kind: alive.get(kind, 0) for kind in kinds},
            }
            for at, alive in zip(self.times, self.alive, strict=True)
        ]
        ranges = [
            {"ph": "X", "name": name, "pid": rank, "tid": 0, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
            for begin, end, name in self.actions
        ]
        named = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"memory of rank {rank}"}}
        return [named, *counters, *ranges]


def timeline_figure(timeline: MemoryHistory, title: str) -> Figure:
    """Draw a stacked area of the kinds over a step, with the executor's actions below."""
    figure = new_figure(10, 5)
    panel, below = figure.subplots(2, 1, sharex=True, height_ratios=(12, 1))
    at = _thinned(timeline)
    times = [1e3 * timeline.times[i] for i in at]
    largest = max(sum(timeline.alive[i].values()) for i in at)
    scale, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    kinds = timeline.kinds
    layers = [[timeline.alive[i].get(kind, 0) / scale for i in at] for kind in kinds]
    colours = [COLOURS.get(kind, "#CC79A7") for kind in kinds]
    panel.stackplot(times, layers, labels=kinds, colors=colours, step="post", linewidth=0)
    peak = timeline.peak()
    when, most = 1e3 * timeline.times[peak], sum(timeline.alive[peak].values()) / scale
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


def _thinned(timeline: MemoryHistory) -> list[int]:
    """Downsample to `_POINTS` points: the maximum of each interval, and both ends."""
    count = len(timeline.times)
    if count <= _POINTS:
        return list(range(count))
    edges = [count * i // _POINTS for i in range(_POINTS + 1)]
    totals = [sum(alive.values()) for alive in timeline.alive]
    most = [max(range(a, b), key=totals.__getitem__) for a, b in itertools.pairwise(edges)]
    return sorted({0, *most, count - 1})
