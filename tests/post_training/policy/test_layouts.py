"""Law 1 for policy gradients: on any layout the same answers, rewards and updates as in one process."""

from __future__ import annotations

import pytest

from megazero.config.rules.table import broken_rules
from megazero.ops import native
from tests.layouts.layout import Layout
from tests.post_training.policy.toy import config_of, train

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")

STEPS = 4
DISCRETE = ("reward", "answer_length", "truncated", "equal_groups", "failed_rewards")
ROUNDED = ("grad_norm", "reward_std", "surprisal", "kl")
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
    }
    return {"policy": policy}


@pytest.mark.seconds(6)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_answers_and_learns_like_one_process(layout, tmp_path):
    number = LAYOUTS.index(layout)
    assert broken_rules(config_of(layout, tmp_path, STEPS, of(number)), layout.world_size) == []
    one = train(layout.serial, tmp_path, STEPS, of(number))
    rows = train(layout, tmp_path, STEPS, of(number))
    assert len(one) == len(rows) == STEPS
    assert any(row["grad_norm"] > 0 for row in one)
    for want, got in zip(one, rows, strict=True):
        for name in DISCRETE:
            assert got[name] == pytest.approx(want[name], rel=1e-12), name
        for name in ROUNDED:
            if name in want:
                assert got[name] == pytest.approx(want[name], rel=2e-5, abs=1e-7), name
    assert [row["apart"] for row in rows[::4]] == [0.0], "the first update on a rollout"
