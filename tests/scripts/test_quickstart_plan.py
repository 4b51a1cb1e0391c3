"""How the quickstart chooses its layout, precision and number of steps."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

from scripts import quickstart_plan
from scripts.quickstart_plan import Candidate, choose, layout_of, main, may_gain_from_bf16, steps_within
from tests.tables import over_table

TWO, ONE = Candidate(2, 1), Candidate(1, 2)
IN_BF16 = Candidate(2, 1, "bf16")
SECONDS = {TWO: 0.5, ONE: 0.8, IN_BF16: 0.25}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """What a clock says that stands still unless a test gives it times."""
    times: list[float] = []
    stand_in = SimpleNamespace(monotonic=lambda: times.pop(0) if times else 0.0)
    monkeypatch.setattr(quickstart_plan, "time", stand_in)
    return times


@over_table(
    ("seconds", "per_step", "steps"),
    [
        (180.0, 1.0, 144),  # 0.95 x 170 steps, but for the 17 that evaluations take
        (180.0, 0.05, 2000),
        (180.0, 60.0, 20),
        (5.0, 1.0, 20),
    ],
)
def test_steps_fit_into_the_time(seconds, per_step, steps):
    assert steps_within(seconds, per_step, most=2000) == steps


@pytest.mark.parametrize(
    ("try_bf16", "chosen", "tried"),
    [(True, IN_BF16, [TWO, ONE, IN_BF16]), (False, TWO, [TWO, ONE])],
)
def test_the_fastest_is_chosen_and_only_it_is_tried_in_bf16(try_bf16, chosen, tried):
    choice = choose([TWO, ONE], try_bf16, SECONDS.__getitem__, 180.0, 2000)
    assert choice.candidate == chosen
    assert list(choice.measured) == tried
    assert choice.steps == steps_within(180.0, SECONDS[chosen], 2000)
    assert "2 ranks x 1 thread, fp32" in choice.table()
    assert choice.table().count("<- the fastest") == 1


def test_bf16_that_is_slower_is_measured_and_left():
    seconds = {**SECONDS, IN_BF16: 0.6}
    assert choose([TWO, ONE], True, seconds.__getitem__, 180.0, 2000).candidate == TWO


def test_measuring_is_part_of_the_time(clock):
    clock += [100.0, 140.0]
    assert choose([TWO], False, SECONDS.__getitem__, 180.0, 2000).seconds == 140.0


@over_table(
    ("flags", "in_bf16", "gains"),
    [
        ("avx2 fma", 2.0, False),
        ("avx512_bf16", 0.5, False),
        ("avx512_bf16", 1.5, True),
        ("amx_bf16", 9.0, True),
    ],
)
def test_bf16_is_tried_where_its_products_are_not_slower(
    monkeypatch, tmp_path, capsys, flags, in_bf16, gains
):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t: fpu {flags}\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rates = {torch.bfloat16: in_bf16 * 1e11, torch.float32: 1e11}
    monkeypatch.setattr("megazero.train.observe.host.measure_matmul_rate", rates.__getitem__)
    assert may_gain_from_bf16(1, cpuinfo) is gains
    assert ("50 and 100 GFLOP/s" in capsys.readouterr().err) == (in_bf16 == 0.5)


@over_table("text", ["2", "0x1", "2x", "x2", "2x-1"])
def test_a_layout_is_replicas_by_threads(text):
    assert layout_of("2x1") == TWO
    with pytest.raises(argparse.ArgumentTypeError, match="REPLICASxTHREADS"):
        layout_of(text)


def test_the_output_is_one_line_and_people_read_the_error_stream(monkeypatch, capsys):
    monkeypatch.setattr(quickstart_plan, "may_gain_from_bf16", lambda threads: True)
    monkeypatch.setattr(quickstart_plan, "seconds_per_step", lambda entry, flags, way: SECONDS[way])
    arguments = ["--minutes", "3", "--layouts", "2x1", "1x2", "--entry", "pretrain_gpt.py", "--", "--lr", "1"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.out == f"2 1 bf16 {steps_within(180.0, 0.25, 2000)}\n"
    assert "timed 1 rank x 2 threads, fp32: 0.800 s per step" in said.err


def test_a_trial_that_fails_shows_its_words(monkeypatch):
    with pytest.raises(SystemExit, match="a trial of 1 rank x 1 thread, fp32 ended with status 2"):
        quickstart_plan.seconds_per_step("pretrain_gpt.py", ["--no-such-flag"], Candidate(1, 1))
