"""Renders timelines as text, as a picture, and as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.pictures import check_suffix, new_figure
from megazero.pipeline.actions import Op
from megazero.pipeline.simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = MappingProxyType(
    {
        Op.FORWARD: "#4c78c8",
        Op.BACKWARD: "#58a55c",
        Op.INPUT: "#2a9d9d",
        Op.WEIGHT: "#e0973d",
        Op.GATHER: "#b0a3d4",
        Op.REDUCE: "#d48a9c",
    }
)
NAMES = MappingProxyType(
    {
        Op.FORWARD: "forward",
        Op.BACKWARD: "backward",
        Op.INPUT: "input gradient",
        Op.WEIGHT: "weight gradient",
        Op.GATHER: "gather",
        Op.REDUCE: "reduce",
    }
)


def render_text(timeline: Timeline) -> str:
    """Draw the timeline as text, as papers do: a line per stage, a cell per unit of time.

    An action's first cell shows its letter and micro-batch, with the chunk in between if a stage has several;
    ``-`` is an action that continues, ``.`` an idle cell. The unit is the largest that divides all times; if
    this takes more than 500 cells, it is the shortest action, and times are rounded to it. An action that
    takes no time has no cell.
    """
    unit = _unit(timeline)
    columns = _cell(timeline.makespan, unit)
    rows = []
    for spans in timeline.spans:
        cells = ["."] * columns
        for span in spans:
            start, end = _cell(span.start, unit), _cell(span.end, unit)
            if start < end:
                cells[start:end] = [_label(timeline, span), *["-"] * (end - start - 1)]
        rows.append(cells)
    width = max(len(cell) for cells in rows for cell in cells)
    margin = len(f"stage {len(rows) - 1}")
    return "\n".join(
        f"{f'stage {stage}':<{margin}} | " + " ".join(f"{cell:<{width}}" for cell in cells).rstrip()
        for stage, cells in enumerate(rows)
    )


def _unit(timeline: Timeline) -> float:
    times = {time for spans in timeline.spans for span in spans for time in (span.start, span.end)}
    exact = reduce(_common_measure, (Fraction(time).limit_denominator(1000) for time in times))
    return float(exact) if exact and timeline.makespan / exact <= 500 else _shortest(timeline)


def _shortest(timeline: Timeline) -> float:
    """The duration of the shortest action that takes any time."""
    durations = (span.end - span.start for spans in timeline.spans for span in spans)
    return min((duration for duration in durations if duration > 0), default=1.0)


def _common_measure(a: Fraction, b: Fraction) -> Fraction:
    denominator = math.lcm(a.denominator, b.denominator)
    return Fraction(math.gcd(int(a * denominator), int(b * denominator)), denominator)


def _cell(time: float, unit: float) -> int:
    return math.floor(time / unit + 0.5)


def _label(timeline: Timeline, span: Span) -> str:
    action = span.action
    chunk = f"{action.chunk}." if timeline.schedule.chunks_per_stage > 1 else ""
    return f"{action.op.value}{chunk}{action.microbatch}"


def draw(timeline: Timeline, path: str | Path) -> None:
    """Draw the timeline into a file, in the format of its suffix. Needs matplotlib.

    A box is an action, its number the micro-batch. If a stage has several chunks, later ones are darker.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix is not one of `pictures.SUFFIXES`.
    """
    path = Path(path)
    check_suffix(path)
    figure_of(timeline).savefig(path, dpi=120)


def figure_of(timeline: Timeline) -> Figure:
    """The picture that `draw` writes, with one bar per action.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    shortest = _shortest(timeline)
    width = min(40.0, max(8.0, 2.0 + 0.3 * timeline.makespan / shortest))
    figure = new_figure(width, 1.6 + 0.5 * timeline.schedule.stages)
    axes = figure.add_subplot()
    # Draw all numbers or none: numbers in some boxes would look like a pattern.
    room = (width - 1.5) * 72 / timeline.makespan * shortest
    numbered = room > 5.5 * len(str(timeline.schedule.microbatches - 1)) + 2
    for stage, spans in enumerate(timeline.spans):
        for span in spans:
            _draw_box(axes, timeline, stage, span, numbered)
    _draw_frame(axes, timeline)
    return figure


def _draw_box(axes: Axes, timeline: Timeline, stage: int, span: Span, numbered: bool) -> None:
    schedule, action = timeline.schedule, span.action
    later = schedule.chunks_of(stage).index(action.chunk) / max(1, schedule.chunks_per_stage - 1)
    colour = _shade(COLOURS[action.op], later)
    length = span.end - span.start
    axes.barh(stage, length, 0.86, span.start, color=colour, edgecolor="white", linewidth=0.8)
    if numbered:
        ink = "white" if later >= 0.5 else "black"
        middle, number = span.start + length / 2, str(action.microbatch)
        axes.text(middle, stage, number, ha="center", va="center", fontsize=8, color=ink)


def _shade(colour: str, later: float) -> tuple[float, float, float]:
    """`colour` mixed with white for the first chunk (`later` 0), a little darker for the last (1)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    strength = 0.55 + 0.45 * later

    def mixed(part: float) -> float:
        return (1 - strength + strength * part) * (1 - 0.2 * later)

    return mixed(red), mixed(green), mixed(blue)


def _draw_frame(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    used = {span.action.op for spans in timeline.spans for span in spans}
    chunks = [f", chunk {n + 1} of the stage" for n in range(schedule.chunks_per_stage)]
    rows = [(op, later, chunk) for op in COLOURS if op in used for later, chunk in enumerate(chunks)]
    scale = max(1, len(chunks) - 1)
    handles = [
        Patch(color=_shade(COLOURS[op], later / scale), label=NAMES[op] + (chunk if len(chunks) > 1 else ""))
        for op, later, chunk in rows
    ]
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(used), frameon=False)
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)])
    axes.set_xlabel("time")
    axes.set_facecolor("#eeeeee")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"{schedule.kind}, {schedule.stages} × {schedule.microbatches} (stages × micro-batches): "
        f"bubble {timeline.bubble:.1%}",
        fontsize=10,
    )


def chrome_trace(timeline: Timeline) -> dict[str, object]:
    """Return the trace as a JSON object, with the timeline's times in seconds.

    Each stage is a thread; its collectives, if it has any, are a second one.
    """
    events: list[dict[str, object]] = []
    for stage, spans in enumerate(timeline.spans):
        events += _thread(2 * stage, f"stage {stage}", spans)
        if timeline.collectives[stage]:
            events += _thread(2 * stage + 1, f"stage {stage} collectives", timeline.collectives[stage])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _thread(number: int, name: str, spans: Iterable[Span]) -> list[dict[str, object]]:
    place = {"pid": 0, "tid": number}
    return [
        {"ph": "M", "name": "thread_name", "args": {"name": name}, **place},
        {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": number}, **place},
        *(
            {
                "ph": "X",
                "name": str(span.action),
                "cat": NAMES[span.action.op],
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"chunk": span.action.chunk, "microbatch": span.action.microbatch},
                **place,
            }
            for span in spans
        ),
    ]
