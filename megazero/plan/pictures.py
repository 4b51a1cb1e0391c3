"""A plan as pictures: what the fullest and the emptiest ranks hold over a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.pictures import check_suffix, new_figure
from megazero.pipeline.simulate import Timeline
from megazero.plan.stage import UPDATE, StagePlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIB = 2**30


def draw_memory(stages: Sequence[StagePlan], timeline: Timeline, room: int, path: Path) -> None:
    """Draw the bytes on the devices of some stages over a step into a file.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix is not one of `pictures.SUFFIXES`.
    """
    check_suffix(path)
    memory_figure(stages, timeline, room).savefig(path, dpi=120)


def memory_figure(stages: Sequence[StagePlan], timeline: Timeline, room: int) -> Figure:
    """The picture that `draw_memory` writes: a line for each stage, and one for the room that there is."""
    figure = new_figure(11, 4.5)
    axes = figure.add_subplot()
    for stage in stages:
        times, sizes = _curve(stage, timeline)
        (line,) = axes.plot(times, [size / _GIB for size in sizes], lw=1.2, label=f"stage {stage.stage}")
        axes.axhline(stage.resting / _GIB, color=line.get_color(), lw=0.8, ls=":")
    axes.axhline(room / _GIB, color="black", lw=1, ls="--", label="room for the allocator")
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(0)
    axes.set_xlabel("seconds; dotted: what is held between steps")
    axes.set_ylabel("GiB on the device")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(stages) + 1, frameon=False)
    return figure


def _curve(stage: StagePlan, timeline: Timeline) -> tuple[list[float], list[int]]:
    """Moments of a step in seconds, and the bytes on the device then."""
    spans = {str(span.action): span for span in timeline.spans[stage.stage]}
    times, sizes = [0.0], [stage.resting]
    for name, most, left in stage.timeline:
        if name in spans or name == UPDATE:
            start, end = spans[name][1:] if name in spans else (timeline.makespan, timeline.makespan)
            times += [start, (start + end) / 2, end]
            sizes += [sizes[-1], stage.resting + most, stage.resting + left]
    return times, sizes
