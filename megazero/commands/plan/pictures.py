"""Pictures of a step: a lane for each stage, folded to a page's width like lines of text, and its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.account.profilers.memory_picture import draw_memory, kind_legend
from megazero.account.profilers.timeline import MemoryHistory
from megazero.commands.plan.timeline import NAMES
from megazero.pictures.labels import write_on
from megazero.pictures.style import WIDTH, Theme, new_figure
from megazero.pipeline.actions import Op
from megazero.pipeline.simulate import Timeline
from megazero.plan.report import PlanReport
from megazero.plan.stage import UPDATE, StagePlan
from megazero.plan.times import StepTimes
from megazero.plan.words import time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

_KINDS = MappingProxyType({**{op.value: name for op, name in NAMES.items()}, "U": "update"})
_ROOM, _TALLEST, _BETWEEN = WIDTH - 0.9, 8.5, 0.36  # inches: of a row's boxes, of all rows, from row to row
_LEAST = 4.0  # points of a usual forward, if a step has to shrink
_DIGIT, _NUMBER = 4.0, 6.5  # width and size of a number's letters in points


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
    def lane(self) -> float:
        """The inches of a stage's lane."""
        stages = self.timeline.schedule.stages
        return min(0.24, max(0.12, 2.2 / stages), _TALLEST / stages)

    @property
    def numbers_width(self) -> float:
        """The points that the longest number of a micro-batch takes."""
        return _DIGIT * len(str(self.timeline.schedule.microbatches - 1)) + 3

    def usual(self, op: Op) -> float:
        """The time that three of four actions of a kind take at least, of those that take any; or 0."""
        spans = (span for spans in self.timeline.spans for span in spans if span.action.op is op)
        times = sorted(span.end - span.start for span in spans if span.end > span.start)
        return times[len(times) // 4] if times else 0.0

    @cached_property
    def rows(self) -> list[tuple[float, float]]:
        """The times that rows show: all, with room for numbers or without, or else the step's two ends."""
        most = max(2, int(_TALLEST / (self.lane * self.timeline.schedule.stages + _BETWEEN)))
        points = 72 * _ROOM * self.usual(Op.FORWARD) / self.end
        for width in (self.numbers_width, _LEAST):
            count = math.ceil(width / points)
            if count <= most:
                return [(row * self.end / count, (row + 1) * self.end / count) for row in range(count)]
        length, last = self.end * points / _LEAST, most // 2
        begins = [row * length for row in range(most - last)]
        begins += [self.end - row * length for row in range(last, 0, -1)]
        return [(begin, begin + length) for begin in begins]


def drawn_schedule(timeline: Timeline, forward: float, *facts: str) -> DrawnStep:
    """A schedule whose stages take `forward` for one forward, with further facts for the subtitle."""
    schedule = timeline.schedule
    sizes = f"{schedule.stages} stages, {schedule.microbatches} micro-batches"
    subtitle = "; ".join((*facts, f"bubble {timeline.bubble:.1%} of all stages' time"))
    unit = f"one forward of a stage is {forward:g}"
    return DrawnStep(timeline, f"Pipeline schedule {schedule.kind}: {sizes}", subtitle, unit)


def drawn_plan(report: PlanReport) -> DrawnStep:
    """The step of a plan, in seconds or, if it takes less than one, in milliseconds."""
    times, scale = report.times, 1e3 if report.times.seconds < 1 else 1.0
    facts = f"bubble {times.bubble:.1%} of the stages' time; the update takes {time_text(times.update.total)}"
    title, subtitle = f"Plan of a step: {time_text(times.seconds)}", f"{report.headline()}\n{facts}"
    return DrawnStep(times.timeline, title, subtitle, "s" if scale == 1 else "ms", scale, times.update.total)


def step_figure(step: DrawnStep, theme: Theme) -> Figure:
    """Draw a step; it is called within `styled` of this theme."""
    from matplotlib.patches import Patch

    schedule, rows, notes = step.timeline.schedule, step.rows, [step.subtitle]
    points = 72 * _ROOM / (rows[0][1] - rows[0][0])
    numbered = {op for op in Op if op.computes and points * step.usual(op) >= step.numbers_width}
    notes += ["numbers are micro-batches"] if numbered else []
    notes += ["fainter: an earlier chunk of the stage"] if schedule.chunks_per_stage > 1 else []
    gaps = [at for at in range(1, len(rows)) if rows[at][0] > rows[at - 1][1] * (1 + 1e-9)]
    heights = [step.lane * schedule.stages] * len(rows)
    for at in gaps:
        heights.insert(at, 0.2)
    figure = new_figure(step.title, "; ".join(notes), height=sum(heights) + _BETWEEN * len(rows) + 1.3)
    panels = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    for at in gaps:
        gap = panels.pop(at)
        gap.set_axis_off()
        ends = (f"{time * step.scale:,.4g}" for time in (rows[at - 1][1], rows[at][0]))
        words = f"⋯  the middle of the step, from {' to '.join(ends)}, is not drawn  ⋯"
        gap.text(0.5, 0.5, words, ha="center", va="center", color=theme.muted)
    kinds = {"U"} if step.update else set()
    for panel, row in zip(panels, rows, strict=True):
        kinds |= _draw_row(panel, step, row, numbered, theme)
    panels[-1].set_xlabel(f"time ({step.unit})")
    handles = [Patch(color=_color(kind, 1, theme), label=_KINDS[kind]) for kind in _KINDS if kind in kinds]
    handles.append(Patch(color=theme.grid, label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.4)
    return figure


def _draw_row(
    panel: Axes, step: DrawnStep, row: tuple[float, float], numbered: set[Op], theme: Theme
) -> set[str]:
    """Draw the boxes of a row, cut off at its ends; returns their kinds."""
    from matplotlib.collections import PolyCollection

    corners: list[list[tuple[float, float]]] = []
    colors: list[ColorType] = []

    def draw(begin: float, end: float, top: float, bottom: float, color: ColorType, number: str = "") -> None:
        begin, end = max(begin, row[0]) * step.scale, min(end, row[1]) * step.scale
        corners.append([(begin, top), (end, top), (end, bottom), (begin, bottom)])
        colors.append(color)
        room = 72 * _ROOM * (end - begin) / (row[1] - row[0]) / step.scale
        if number and room >= step.numbers_width:
            write_on(panel, (begin + end) / 2, (top + bottom) / 2, number, color, _NUMBER)

    schedule, kinds = step.timeline.schedule, set()
    deepest, low = max(1, schedule.chunks_per_stage - 1), 0.19 if any(step.timeline.collectives) else 0.43
    for stage, spans in enumerate(zip(step.timeline.spans, step.timeline.collectives, strict=True)):
        chunks = schedule.chunks_of(stage)
        for (action, start, end), top, bottom in (
            *((span, -0.43, low) for span in spans[0]),
            *((span, 0.23, 0.43) for span in spans[1]),
        ):
            if max(start, row[0]) < min(end, row[1]):
                strength = 0.5 + 0.5 * chunks.index(action.chunk) / deepest if len(chunks) > 1 else 1.0
                color = _color(action.op.value, strength, theme)
                kinds.add(action.op.value)
                number = str(action.microbatch) if action.op in numbered else ""
                draw(start, end, stage + top, stage + bottom, color, number)
        if step.update and row[1] > step.timeline.makespan:
            draw(step.timeline.makespan, step.end, stage - 0.43, stage + 0.43, _color("U", 1, theme))
    panel.add_collection(PolyCollection(corners, facecolors=colors, edgecolors=theme.paper, linewidths=0.4))
    panel.set(xlim=(row[0] * step.scale, row[1] * step.scale), ylim=(schedule.stages - 0.5, -0.5))
    named = range(0, schedule.stages, math.ceil(0.12 / step.lane))
    panel.set_yticks(named, [f"stage {stage}" for stage in named])
    panel.tick_params(axis="y", length=0, labelsize=7.5)
    panel.tick_params(axis="x", labelsize=7.5, pad=2)
    panel.set_facecolor(theme.grid)
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)
    return kinds


def _color(kind: str, strength: float, theme: Theme) -> tuple[float, float, float]:
    """The color of boxes of a kind; weaker ones are nearer to the paper."""
    from matplotlib.colors import to_rgb

    pairs = zip(to_rgb(theme.paper), to_rgb(theme.series[list(_KINDS).index(kind)]), strict=True)
    red, green, blue = (paper + strength * (full - paper) for paper, full in pairs)
    return red, green, blue


def memory_figure(report: PlanReport, theme: Theme) -> Figure:
    """Draw the memory of a plan's first, middle and last stage over a step; it is called within `styled`."""
    stages = report.plan.stages
    chosen = [stages[place] for place in sorted({0, len(stages) // 2, len(stages) - 1})]
    title, height = "Plan of the memory of a device over a step", 1.6 + 1.8 * len(chosen)
    figure = new_figure(title, report.headline(), height=height)
    panels = list(figure.subplots(len(chosen), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    held = [held_over_step(stage, report.times) for stage in chosen]
    draw_memory(panels, held, report.device.allocator_bytes, theme)
    for panel, stage in zip(panels, chosen, strict=True):
        panel.set_title(f"stage {stage.stage}")
    kind_legend(figure, [kind for one in held for kind in one.kinds], theme)
    return figure


def held_over_step(stage: StagePlan, times: StepTimes) -> MemoryHistory:
    """The memory of a stage's device over a step: the most during each action, then what it leaves.

    What operators make counts as activations, transient buffers included.
    """
    spans = {str(span.action): span for span in times.timeline.spans[stage.stage]}
    resting = dict(stage.trace.resting["device"])
    resting["buffers"] = resting.get("buffers", 0) - stage.trace.buffers
    held = MemoryHistory()
    held.add(0.0, {**resting, "activations": 0})
    for name, most, left in stage.timeline:
        if name in spans:
            action, start, end = spans[name]
            words = f"{NAMES[action.op]} of micro-batch {action.microbatch}"
        elif name == UPDATE:
            start, end, words = times.timeline.makespan, times.seconds, UPDATE
        else:
            continue
        held.add(start, {**resting, "activations": most})
        held.add(end, {**resting, "activations": left})
        held.actions.append((start, end, words))
    return held
