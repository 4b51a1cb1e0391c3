"""The timeline of a step as a picture: a lane for each stage, folded to a page's width like lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from megazero.commands.plan.timeline import NAMES
from megazero.pictures.labels import write_on
from megazero.pictures.style import LIGHT, WIDTH, Theme, new_figure, save, styled
from megazero.pipeline.actions import Op
from megazero.pipeline.simulate import Timeline
from megazero.plan.report import PlanReport
from megazero.plan.words import time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERIES = MappingProxyType({op.value: number for number, op in enumerate(NAMES)} | {"update": len(NAMES)})
"""The place of each kind of box among a theme's colors, by the letter of its action."""
_ROOM = WIDTH - 0.9  # inches of a row's boxes; names of stages are beside them
_TALLEST = 8.5  # inches of all rows
_BETWEEN = 0.36  # inches from row to row, for the times
_LEAST = 4.0  # points of a usual forward, if a step has to shrink
_DIGIT, _NUMBER = 4.0, 6.5  # width and size of a number's letters in points


class Window(NamedTuple):
    """The times that a row shows."""

    begin: float
    end: float


class Box(NamedTuple):
    """A box of a row: its kind, its color's strength, its place in times and lanes, and its number if any."""

    kind: str
    strength: float
    begin: float
    end: float
    top: float
    bottom: float
    number: int | None = None


@dataclass(frozen=True)
class DrawnStep:
    """A step to draw.

    Attributes:
        timeline: what stages do, and when.
        title, subtitle: the texts above the picture.
        unit: what times are in, after they are multiplied by `scale`.
        update: the time after the timeline in which the stages update their weights.
    """

    timeline: Timeline
    title: str
    subtitle: str
    unit: str
    scale: float = 1.0
    update: float = 0.0

    @property
    def end(self) -> float:
        """The time at which the step ends."""
        return self.timeline.makespan + self.update

    @property
    def stages(self) -> int:
        """The number of lanes."""
        return self.timeline.schedule.stages

    @property
    def lane(self) -> float:
        """The inches of a lane."""
        return min(0.24, max(0.12, 2.2 / self.stages), _TALLEST / self.stages)

    @cached_property
    def windows(self) -> list[Window]:
        """The rows: as few as have room for numbers, else the whole step in narrow boxes, else both its ends."""
        most = max(2, int(_TALLEST / (self.lane * self.stages + _BETWEEN)))
        points = self.points(self.usual(Op.FORWARD), Window(0, self.end))
        for width in (self.numbers_width, _LEAST):
            rows = math.ceil(width / points)
            if rows <= most:
                return [Window(row * self.end / rows, (row + 1) * self.end / rows) for row in range(rows)]
        length, last = self.end * points / _LEAST, most // 2
        begins = [row * length for row in range(most - last)]
        begins += [self.end - row * length for row in range(last, 0, -1)]
        return [Window(begin, begin + length) for begin in begins]

    @cached_property
    def numbered(self) -> set[Op]:
        """The operations whose boxes have room for the number of any micro-batch."""
        row = self.windows[0]
        return {op for op in Op if op.computes and self.points(self.usual(op), row) >= self.numbers_width}

    @property
    def numbers_width(self) -> float:
        """The points that the longest number takes."""
        return _DIGIT * len(str(self.timeline.schedule.microbatches - 1)) + 3

    def usual(self, op: Op) -> float:
        """The time of an action that three of four of its kind are not shorter than; 0 if there is none."""
        spans = (span for spans in self.timeline.spans for span in spans if span.action.op is op)
        times = sorted(span.end - span.start for span in spans)
        return times[len(times) // 4] if times else 0.0

    def points(self, time: float, row: Window) -> float:
        """The width of a box that takes this time in a row."""
        return 72 * _ROOM * time / (row.end - row.begin)

    def boxes(self, row: Window) -> Iterator[Box]:
        """The boxes of a row, cut off at its ends."""
        deepest = max(1, self.timeline.schedule.chunks_per_stage - 1)
        beside = any(self.timeline.collectives)
        for stage, kinds in enumerate(zip(self.timeline.spans, self.timeline.collectives, strict=True)):
            places = self.timeline.schedule.chunks_of(stage)
            for spans, top, bottom in zip(kinds, (-0.43, 0.23), (0.19 if beside else 0.43, 0.43), strict=True):
                for action, start, end in spans:
                    begin, end = max(start, row.begin), min(end, row.end)
                    if begin >= end:
                        continue
                    number = action.microbatch if action.op in self.numbered else None
                    if self.points(end - begin, row) < self.numbers_width:
                        number = None
                    strength = 0.5 + 0.5 * places.index(action.chunk) / deepest if len(places) > 1 else 1.0
                    yield Box(action.op.value, strength, begin, end, stage + top, stage + bottom, number)
            if self.update and row.end > self.timeline.makespan:
                begin = max(self.timeline.makespan, row.begin)
                yield Box("update", 1.0, begin, row.end, stage - 0.43, stage + 0.43)

    def explained(self) -> str:
        """The subtitle, and what numbers and faint colors mean if there are any."""
        notes = ["numbers are micro-batches"] if self.numbered else []
        notes += ["fainter: an earlier chunk of the stage"] if self.timeline.schedule.chunks_per_stage > 1 else []
        return "; ".join((self.subtitle, *notes))

    def left_out(self) -> str:
        """Say which times no row shows; empty if there are none."""
        for before, after in zip(self.windows, self.windows[1:], strict=False):
            if after.begin > before.end * (1 + 1e-9):
                first, last = (f"{time * self.scale:,.4g}" for time in (before.end, after.begin))
                return f"the middle of the step, from {first} to {last}, is not drawn"
        return ""


def drawn_schedule(timeline: Timeline, forward: float, whose: str = "") -> DrawnStep:
    """A schedule whose stages take `forward` for a micro-batch's forward; `whose` says whose schedule it is."""
    schedule, chunks = timeline.schedule, timeline.schedule.chunks_per_stage
    title = f"Pipeline schedule {schedule.kind}: {schedule.stages} stages, {schedule.microbatches} micro-batches"
    facts = [whose] if whose else []
    facts += [f"{chunks} chunks on each stage"] if chunks > 1 else []
    facts += [f"bubble {timeline.bubble:.1%} of all stages' time"]
    unit = "one forward of a stage is 1" if forward == 1 else f"one forward of a stage is {forward:g}"
    return DrawnStep(timeline, title, "; ".join(facts), unit)


def drawn_plan(report: PlanReport) -> DrawnStep:
    """The step of a plan, in seconds or, if it takes less than one, in milliseconds."""
    times = report.times
    unit, scale = ("s", 1.0) if times.seconds >= 1 else ("ms", 1e3)
    facts = f"bubble {times.bubble:.1%} of the stages' time; the update takes {time_text(times.update.total)}"
    title = f"Plan of a step: {time_text(times.seconds)}"
    subtitle = f"{report.headline()}\n{facts}"
    return DrawnStep(times.timeline, title, subtitle, unit, scale, times.update.total)


def draw_step(step: DrawnStep, path: Path, theme: Theme = LIGHT) -> None:
    """Draw a step into a file, in the format of its suffix.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    with styled(theme):
        save(step_figure(step, theme), path)


def step_figure(step: DrawnStep, theme: Theme) -> Figure:
    """Draw a step; it is called within `styled` of this theme."""
    rows, note = step.windows, step.left_out()
    heights = [step.lane * step.stages] * len(rows)
    middle = len(rows) - len(rows) // 2
    if note:
        heights.insert(middle, 0.2)
    height = sum(heights) + _BETWEEN * len(rows) + 1.3
    figure = new_figure(step.title, step.explained(), height=height)
    panels = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    if note:
        gap = panels.pop(middle)
        gap.set_axis_off()
        gap.text(0.5, 0.5, f"⋯  {note}  ⋯", ha="center", va="center", fontsize=8.5, color=theme.muted)
    kinds: set[str] = set()
    for panel, row in zip(panels, rows, strict=True):
        boxes = list(step.boxes(row))
        kinds |= {box.kind for box in boxes}
        _draw_boxes(panel, boxes, step.scale, theme)
        _draw_frame(panel, step, row, theme)
    panels[-1].set_xlabel(f"time ({step.unit})")
    _draw_legend(figure, step, kinds, theme)
    return figure


def color_of(kind: str, strength: float, theme: Theme) -> tuple[float, float, float]:
    """The color of boxes of a kind; weaker ones are nearer to the paper."""
    from matplotlib.colors import to_rgb

    pairs = zip(to_rgb(theme.paper), to_rgb(theme.series[SERIES[kind]]), strict=True)
    red, green, blue = (paper + strength * (full - paper) for paper, full in pairs)
    return red, green, blue


def _draw_boxes(panel: Axes, boxes: list[Box], scale: float, theme: Theme) -> None:
    from matplotlib.collections import PolyCollection

    colors = {key: color_of(*key, theme) for key in {(box.kind, box.strength) for box in boxes}}
    corners = []
    for box in boxes:
        begin, end = box.begin * scale, box.end * scale
        corners.append([(begin, box.top), (end, box.top), (end, box.bottom), (begin, box.bottom)])
        if box.number is not None:
            middle = ((begin + end) / 2, (box.top + box.bottom) / 2)
            write_on(panel, middle, str(box.number), colors[box.kind, box.strength], _NUMBER)
    faces = [colors[box.kind, box.strength] for box in boxes]
    panel.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=theme.paper, linewidths=0.4))


def _draw_frame(panel: Axes, step: DrawnStep, row: Window, theme: Theme) -> None:
    panel.set_xlim(row.begin * step.scale, row.end * step.scale)
    panel.set_ylim(step.stages - 0.5, -0.5)
    apart = math.ceil(0.12 / step.lane)
    named = range(0, step.stages, apart)
    panel.set_yticks(named, [f"stage {stage}" for stage in named], fontsize=7.5)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(axis="x", labelsize=7.5, pad=2)
    panel.set_facecolor(theme.grid)
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)


def _draw_legend(figure: Figure, step: DrawnStep, kinds: set[str], theme: Theme) -> None:
    from matplotlib.patches import Patch

    names = {op.value: name for op, name in NAMES.items()} | {"update": "update"}
    handles = [Patch(color=color_of(kind, 1.0, theme), label=names[kind]) for kind in SERIES if kind in kinds]
    handles.append(Patch(color=theme.grid, label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.4)
