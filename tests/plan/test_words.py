"""Figures in words, literally."""

from __future__ import annotations

from megazero.plan.words import many, runs, time_text
from tests.tables import over_table


@over_table(
    ("number", "said"),
    [(0, "0"), (999, "999"), (52_530, "52,530"), (999_999, "999,999"), (1e6, "1.00M"), (174.62e9, "174.62B")],
)
def test_large_numbers(number, said):
    assert many(number) == said


def test_rates_say_giga():
    assert many(55.94e9, "MGTP") == "55.94G"


@over_table(
    ("seconds", "said"),
    [(0.0068, "6.80 ms"), (0.5, "0.50 s"), (18.77, "18.77 s"), (180, "3.0 min"), (1788480, "20.7 days")],
)
def test_times(seconds, said):
    assert time_text(seconds) == said


def test_runs():
    assert runs([0, 1, 2, 3, 5, 7, 8]) == "0-3, 5, 7-8"
