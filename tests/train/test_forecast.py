"""The forecast in the console's line: literal cases, and a law over the plans of growing steps."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from datetime import datetime, timedelta

from rich.console import Console

from megazero.config.steps import BatchRamp, Progress, SequenceLengths, Steps
from megazero.config.training_plan import Limits
from megazero.train.observe.monitors.console import ConsoleMonitor
from megazero.train.observe.news.forecast import Forecast
from tests.tables import over_table
from tests.train.samples import step


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def forecast_of(seconds: Iterable[float], total: int, between: float = 0.0) -> str | None:
    """The text after steps of 512 tokens that take these seconds, with so many more between any two."""
    clock = Clock()
    forecast = Forecast(512 * total, clock)
    for iteration, spent in enumerate(seconds, 1):
        clock.now += spent + (between if iteration > 1 else 0.0)
        forecast.step(step(iteration, seconds=spent))
    return forecast.text()


def left(text: str | None) -> str | None:
    return None if text is None else text.partition(" (")[0]


@over_table(
    ("seconds", "total", "between", "expected"),
    [
        ([9.0], 100, 0.0, None),  # the first step says nothing of the others
        ([9.0, 2.0], 100, 0.0, "ETA: 0:03:16"),
        ([9.0, 2.0, 2.0, 2.0], 5766, 0.0, "ETA: 3:12:04"),
        ([9.0, 2.0, 2.0, 2.0, 90.0, 2.0, 2.0], 100, 0.0, "ETA: 0:03:06"),  # one slow step moves no median
        (
            [9.0, 2.0, 2.0, 2.0],
            100,
            1.0,
            "ETA: 0:04:48",
        ),  # evaluations and checkpoints, half as long as steps
        ([9.0, 2.0, 2.0], 3, 0.0, None),  # the end
        ([9.0, 0.0, 0.0], 100, 0.0, None),
        ([9.0, 60.0], 100_000, 0.0, "ETA: 69 days, 10:38:00"),
        ([9.0, 1e9], 100_000, 0.0, None),
    ],
)
def test_by_hand(seconds, total, between, expected):
    assert left(forecast_of(seconds, total, between)) == expected


def test_the_date_is_local_and_has_a_year_where_a_weekday_is_not_enough():
    for seconds, form in ((2.0, "%a %H:%M"), (20_000.0, "%Y-%m-%d %H:%M")):
        text = forecast_of([9.0, seconds], 100)
        ends = [datetime.now() + timedelta(seconds=98 * seconds + late) for late in (-60, 0)]
        assert re.fullmatch(r"ETA: .+ \((.+)\)", text)[1] in [f"{end:{form}}" for end in ends]


@over_table(
    ("steps", "limits"),
    [
        (Steps(BatchRamp(4, 4, 300, 12), 2, SequenceLengths.constant(64)), Limits(iterations=60)),
        (Steps(BatchRamp(4, 4, 300, 12), 2, SequenceLengths.constant(64)), Limits(samples=700)),
        (
            Steps(BatchRamp.constant(4), 2, SequenceLengths(((0, 16), (30, 32), (50, 64)))),
            Limits(tokens=9000),
        ),
    ],
)
def test_where_a_token_takes_a_tenth_of_a_second_the_forecast_is_the_time_that_is_left(steps, limits):
    end, clock = limits.end(steps), Clock()
    forecast, progress, first = Forecast(end.tokens, clock), Progress(), True
    while progress != end:
        this = steps.at(progress)
        progress, seconds = this.after, this.tokens / 10
        clock.now += seconds
        forecast.step(step(progress.iteration, consumed_tokens=progress.tokens, seconds=seconds))
        remaining = timedelta(seconds=round((end.tokens - progress.tokens) / 10))
        assert left(forecast.text()) == (None if first or progress == end else f"ETA: {remaining}")
        first = False


def test_steps_that_are_made_again_count_again():
    clock = Clock()
    forecast = Forecast(512 * 100, clock)
    for iteration in (1, 2, 3, 4, 3, 4):  # back to a checkpoint after 2
        clock.now += 2.0
        forecast.step(step(iteration, seconds=2.0))
    assert left(forecast.text()) == "ETA: 0:03:12"


def test_it_is_the_last_part_of_the_line_and_leaves_the_others_as_they_are():
    lines = []
    for forecast in (None, Forecast(512 * 9)):
        stream = io.StringIO()
        monitor = ConsoleMonitor(1, 9, forecast=forecast, console=Console(file=stream, width=60))
        for iteration in (1, 2, 9):
            monitor.step(step(iteration))
        lines.append([line[22:] for line in stream.getvalue().splitlines()])
    bare, shown = lines
    assert (shown[0], shown[2]) == (bare[0], bare[2]), "after the first step, and at the end, nothing is said"
    assert re.fullmatch(re.escape(bare[1]) + r" ETA: 0:00:0\d \(\w{3} \d\d:\d\d\) \|", shown[1])
