"""Law 1 for policy gradients: on any layout the same answers, rewards and updates as in one process."""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path

import pytest

from megazero.config.rules.table import broken_rules
from megazero.ops import native
from tests.layouts.layout import Layout
from tests.layouts.selection import covering
from tests.post_training.policy.toy import config_of, train
from tests.tables import over_table

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")

STEPS = 4
DISCRETE = ("reward", "answer_length", "truncated", "equal_groups", "failed_rewards", "resampled")
ROUNDED = ("grad_norm", "reward_std", "surprisal", "entropy", "kl")
LAYOUTS = [
    Layout(shape="llama", tp=2),
    Layout(shape="llama", pp=2),
    Layout(shape="llama", dp=2),
    Layout(shape="llama", experts="top2", dp=2, ep=2),
    Layout(shape="llama", tp=2, dp=2, zero=3, sequence_parallel=True),
    Layout(shape="llama", cp=2),
    Layout(shape="gpt2", pp=2, schedule="zb-h1", dp=2, zero=1),
    Layout(shape="llama", pp=2, schedule="interleaved", virtual=2, layers=4),
    Layout(shape="llama", micro_batch=4, dp=2),
    Layout(shape="gpt2", tp=2, micro_batch=2, recompute="full"),
    Layout(shape="llama", dp=2, zero=2),
    Layout(shape="llama", dp=2, zero=3, keep=True),
    Layout(shape="gpt2", dp=4, zero=3, untied=True),
    Layout(shape="llama", cp=2, tp=2, sequence_parallel=True),
    Layout(shape="llama", cp=2, dp=2, zero=3),
    Layout(shape="gpt2", pp=2, schedule="zb-v", layers=4),
    Layout(shape="llama", pp=4, schedule="gpipe", layers=4),
    Layout(shape="llama", tp=2, pp=2, dp=2, zero=1),
    Layout(shape="llama", experts="top2", tp=2, micro_batch=2),
    Layout(shape="llama", experts="top2", tp=2, ep=2, etp=1, dispatcher="allgather"),
    Layout(shape="llama", experts="shared", cp=2, dp=2, ep=2),
    Layout(shape="llama", tp=4),
    Layout(shape="deepseek-lite", tp=2, dp=2, zero=1),
]
METHODS = ("grpo", "dapo", "gspo", "dr-grpo", "rloo")


def of(number: int) -> dict:
    """Settings of a layout: the methods in turn, of two updates on each of two passes over a rollout."""
    policy = {
        "policy_method": METHODS[number % len(METHODS)],
        "prompts_per_rollout": 4,
        "rollout_iterations": 2,
        "resample_rounds": number % 2,
    }
    return {"policy": policy}


def drawn(seed: int, count: int = 2000) -> list[Layout]:
    """Layouts of all axes on at most eight ranks, whether the rules allow them or not."""
    dice, layouts = random.Random(seed), dict[Layout, None]()
    for _ in range(count):
        pp, schedule, virtual = dice.choice(
            [(1, "1f1b", 1)] * 4
            + [(2, "gpipe", 1), (2, "1f1b", 1), (2, "zb-h1", 1), (2, "interleaved", 2), (2, "zb-v", 1)]
        )
        experts, zero = dice.choice(("", "", "top2", "shared")), dice.choice((0, 1, 2, 3))
        tp, cp = dice.choice((1, 1, 2)), dice.choice((1, 1, 2))
        layout = Layout(
            tp=tp,
            pp=pp,
            dp=dice.choice((1, 2)),
            cp=cp,
            comm=dice.choice(("p2p", "all_gather", "a2a")) if cp > 1 else "p2p",
            schedule=schedule,
            virtual=virtual,
            zero=zero,
            keep=zero == 3 and dice.choice((False, True)),
            sequence_parallel=tp > 1 and dice.choice((False, True)),
            recompute=dice.choice(("none", "full", "selective")),
            micro_batch=dice.choice((1, 2, 4)),
            shape=dice.choice(("gpt2", "llama", "deepseek-lite")),
            untied=dice.choice((False, True)),
            experts=experts,
            ep=dice.choice((1, 2)) if experts else 1,
            layers=4,
        )
        if layout.world_size <= 8:
            layouts[layout] = None
    return list(layouts)


def compare(layout: Layout, number: int, folder: Path) -> float:
    """Train on a layout and in one process; return the largest relative difference of what is rounded."""
    rows, worst = train(layout, folder, STEPS, of(number)), 0.0
    one = alone(layout.serial, number % 10)
    assert len(one) == len(rows) == STEPS
    assert any(row["grad_norm"] > 0 for row in one)
    for want, got in zip(one, rows, strict=True):
        for name in DISCRETE:
            assert got[name] == pytest.approx(want[name], rel=1e-12), name
        for name in (name for name in ROUNDED if name in want):
            assert got[name] == pytest.approx(want[name], rel=2e-5, abs=1e-7), name
            worst = max(worst, abs(got[name] - want[name]) / max(abs(want[name]), 1e-2))
    assert [row["apart"] for row in rows[::4]] == [0.0], "the first update on a rollout"
    return worst


@cache
def alone(layout: Layout, number: int) -> list[dict]:
    """The figures of one process."""
    with tempfile.TemporaryDirectory() as folder:
        return train(layout, Path(folder), STEPS, of(number))


@pytest.mark.seconds(6)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_answers_and_learns_like_one_process(layout, tmp_path, record_property):
    number = LAYOUTS.index(layout)
    assert broken_rules(config_of(layout, tmp_path, STEPS, of(number)), layout.world_size) == []
    record_property("worst", compare(layout, number, tmp_path))


def chosen() -> list[tuple[int, Layout]]:
    """45 layouts beside those above, in which every two values meet that the rules allow together."""

    with tempfile.TemporaryDirectory() as folder:

        def allowed(layout: Layout) -> bool:
            return not broken_rules(config_of(layout, Path(folder), STEPS, of(0)), layout.world_size)

        layouts = list(covering(drawn(3), 45, allowed=allowed))
    assert len({*layouts, *LAYOUTS}) >= 60
    return list(enumerate(layouts))


@pytest.mark.slow
@over_table(("number", "layout"), chosen, ids=lambda value: getattr(value, "name", value))
def test_any_two_settings_of_layouts_meet_in_one_that_learns_like_one_process(number, layout, tmp_path):
    print(f"{layout.name} {METHODS[number % 5]} {compare(layout, number, tmp_path):.1e}")
