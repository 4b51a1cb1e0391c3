"""Renders timelines as text, and as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import reduce
from types import MappingProxyType

from megazero.pipeline.actions import Op
from megazero.pipeline.simulate import Span, Timeline

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
                action = span.action
                chunk = f"{action.chunk}." if timeline.schedule.chunks_per_stage > 1 else ""
                name = f"{action.op.value}{chunk}{action.microbatch}"
                cells[start:end] = [name, *["-"] * (end - start - 1)]
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
    if exact and timeline.makespan / exact <= 500:
        return float(exact)
    durations = (span.end - span.start for spans in timeline.spans for span in spans)
    return min((duration for duration in durations if duration > 0), default=1.0)


def _common_measure(a: Fraction, b: Fraction) -> Fraction:
    denominator = math.lcm(a.denominator, b.denominator)
    return Fraction(math.gcd(int(a * denominator), int(b * denominator)), denominator)


def _cell(time: float, unit: float) -> int:
    return math.floor(time / unit + 0.5)


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
