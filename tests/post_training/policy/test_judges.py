"""What judges answers beside functions: a reward model; and further prompts for groups of equal rewards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megazero.checkpoint.folder import latest_iteration
from megazero.commands.score import build_parser
from megazero.commands.score import config_of as scored_by
from megazero.errors import CheckpointError, ConfigError
from megazero.mpu.context import solo_context
from megazero.ops import native
from megazero.post_training.policy.cycle import Cycle
from megazero.post_training.score import ScoredLine, score_on
from tests.layouts.layout import Layout
from tests.post_training.policy.toy import GROUP, train
from tests.post_training.samples import LENGTH, make_files, run

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")

ONE = Layout(shape="llama", micro_batch=8)
SEVERAL = {"prompts_per_rollout": 4, "rollout_iterations": 2}


@pytest.fixture
def rollouts(monkeypatch) -> list:
    """The rollouts of the run in this process, the first rank's where there are several."""
    made, held = [], Cycle._hold

    def hold(self, number, rollout):
        if number >= 0 and self.engine.context.rank == 0:
            made.append(rollout)
        held(self, number, rollout)

    monkeypatch.setattr(Cycle, "_hold", hold)
    return made


def even(completions, completion_ids, answer, **columns):
    """Every group of an odd prompt is right; those of an even one are as random as their tokens."""
    return [1.0 if a % 2 else float(sum(ids) % 2) for a, ids in zip(answer, completion_ids, strict=True)]


def never(completions, **columns):
    return [1.0] * len(completions)


RESAMPLED = {
    **SEVERAL,
    "policy_method": "dapo",
    "reward_functions": (f"{__name__}:even",),
    "resample_rounds": 6,
}


def test_groups_of_equal_rewards_are_exchanged_for_those_of_further_prompts(tmp_path, rollouts):
    """Those that stay are as they were, and no prompt is asked twice before all have been."""
    rows = train(ONE, tmp_path, 8, {"policy": RESAMPLED})
    assert all(row["equal_groups"] == 0.0 and not row["skipped"] for row in rows)
    assert rows[0]["resampled"] > 0
    assert len(rollouts) == 2
    seen = []
    for rollout in rollouts:
        firsts = rollout.tokens.reshape(4, GROUP, -1)[:, 0]
        seen += [tuple(row[:n]) for row, n in zip(firsts, rollout.prompts[::GROUP], strict=True)]
        assert np.ptp(rollout.noted["rewards"].reshape(4, GROUP), axis=1).min() > 0
    assert len(set(seen)) == len(seen) == 8
    plain = train(ONE, tmp_path, 3, {"policy": {**RESAMPLED, "resample_rounds": 0}})
    assert plain[0]["equal_groups"] > 0
    before, kept = rollouts[2], rollouts[0].noted["rounds"] == 0
    assert kept.any()
    assert not kept.all()
    width = min(before.tokens.shape[1], rollouts[0].tokens.shape[1])
    assert np.array_equal(rollouts[0].tokens[kept, :width], before.tokens[kept, :width])
    assert np.array_equal(rollouts[0].logs[kept, : width - 1], before.logs[kept, : width - 1])


def test_what_remains_short_is_told_and_in_no_divisor(tmp_path, capsys, rollouts):
    policy = {**RESAMPLED, "reward_functions": (f"{__name__}:never",), "resample_rounds": 2}
    rows = train(ONE, tmp_path, 3, {"policy": policy})
    assert all(row["equal_groups"] == 1.0 and row["resampled"] == 2.0 and row["skipped"] for row in rows)
    assert "4 of 4 groups have equal rewards after 2 further rounds" in capsys.readouterr().out


@pytest.mark.parametrize("stop", [3, 4], ids=["within a rollout", "between rollouts"])
def test_a_resumed_run_draws_the_prompts_that_come_next(tmp_path, stop):
    """Bit for bit: the place in the prompts' order is in every checkpoint."""
    figures = ("reward", "policy_loss", "grad_norm", "resampled", "entropy")
    settings = {"policy": RESAMPLED, "checkpoint": saved(tmp_path / "whole")}
    straight = train(ONE, made(tmp_path / "whole"), 8, settings)
    stops = {"policy": RESAMPLED, "checkpoint": saved(tmp_path / "parts")}
    first = train(ONE, made(tmp_path / "parts"), 8, {**stops, "training": {"exit_interval": stop}})
    assert latest_iteration(tmp_path / "parts/run") == stop
    rest = train(ONE, tmp_path / "parts", 8, stops)
    assert [[row[n] for n in figures] for row in first + rest] == [
        [row[n] for n in figures] for row in straight
    ]
    assert straight[4]["resampled"] > 0
    a, b = weights(tmp_path / "whole/run"), weights(tmp_path / "parts/run")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shape="llama", dp=2),
        pytest.param(Layout(shape="llama", tp=2), marks=pytest.mark.slow),
        pytest.param(Layout(shape="llama", pp=2), marks=pytest.mark.slow),
        pytest.param(Layout(shape="llama", cp=2, dp=2, zero=3), marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_every_layout_draws_the_same_further_prompts(tmp_path, layout):
    one = train(layout.serial, tmp_path, 5, {"policy": RESAMPLED})
    for want, got in zip(one, train(layout, tmp_path, 5, {"policy": RESAMPLED}), strict=True):
        assert [got[n] for n in ("reward", "resampled")] == [want[n] for n in ("reward", "resampled")]
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-5)


def test_the_end_of_an_answer_is_learnt_and_said_once(tmp_path, rollouts):
    """Trap 4: a missing end has no loss, and lengths are never learned; a second one is a token too many."""
    train(ONE, tmp_path, 3)
    ends = 0
    for rollout in rollouts:
        for row in np.flatnonzero(rollout.ended):
            answer, last = rollout.answer(row), rollout.lengths[row] - 1
            assert answer.count(16) == 1
            assert rollout.tokens[row, last] == answer[-1] == 16
            assert rollout.answered()[row, last - 1], "the label of the end counts"
            assert rollout.logs[row, last - 1] < 0
            ends += 1
    assert ends > 0


def test_statistics_are_of_whole_groups_and_of_all_ranks(tmp_path):
    """Traps 6 and 7: four replicas share two groups, and the deviation is that of the whole rollout."""
    settings = {"policy": {"advantage": "batch-std"}}
    layout = Layout(shape="llama", dp=4)
    one, rows = train(layout.serial, tmp_path, 3, settings), train(layout, tmp_path, 3, settings)
    for want, got in zip(one, rows, strict=True):
        assert got["reward"] == want["reward"]
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-5)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def saved(folder: Path) -> dict:
    return {"save": str(folder / "run"), "load": str(folder / "run")}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / f"iter_{latest_iteration(folder):07d}"
    return {f"{p.stem}/{k}": v for p in sorted(path.glob("*.safetensors")) for k, v in load_file(p).items()}


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    """A folder with a tokenizer, a reward model in `run`, and the same for transformers in `hf`."""
    pytest.importorskip("transformers")
    folder = make_files(tmp_path_factory.mktemp("judge"))
    run(folder, "reward", "--epochs", 2, "--save", folder / "run", "--save-hf", folder / "hf")
    return folder


def judged(folder: Path, name: str, **policy) -> dict:
    """Settings of a policy with the tokenizer of `judge`, and its reward model."""
    return {
        "policy": {"reward_model": str(folder / name), **policy},
        "model": {"vocab_size": None, "seq_length": LENGTH},
        "tokenizer": {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(folder)},
    }


@pytest.mark.parametrize("name", ["run", "hf"])
def test_rewards_of_a_model_are_those_that_score_writes(tmp_path, judge, rollouts, name):
    weights = (0.5, 2.0)
    rows = train(ONE, tmp_path, 3, judged(judge, name, reward_weights=weights))
    (first, *_), out = rollouts, tmp_path / "scores.jsonl"
    ids = [row[:n] for row, n in zip(first.tokens, first.lengths, strict=True)]
    lines = [ScoredLine((row,), (np.ones(len(row), bool),), ("score",)) for row in ids]
    given = build_parser().parse_args([str(judge / name), "--data", "none", "--out", str(out)])
    flags = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(judge), "--seq-length", str(LENGTH)]
    score_on(scored_by(given, flags, world_size=1), solo_context(), lines, str(out))
    wanted = [json.loads(line)["score"] for line in out.read_text().splitlines()]
    assert first.noted["rewards"][:, 1] == pytest.approx(wanted, abs=1e-6)
    assert np.std(wanted) > 1e-3
    both = (first.noted["rewards"] * weights).sum(1)
    assert rows[0]["reward"] == pytest.approx(both.mean(), rel=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shape="llama", tp=2),
        pytest.param(Layout(shape="llama", pp=2), marks=pytest.mark.slow),
        pytest.param(Layout(shape="llama", dp=2), marks=pytest.mark.slow),
        Layout(shape="llama", cp=2, micro_batch=2),
        pytest.param(
            Layout(shape="llama", tp=2, dp=2, zero=3, sequence_parallel=True), marks=pytest.mark.slow
        ),
        pytest.param(Layout(shape="llama", pp=2, schedule="zb-v", layers=4), marks=pytest.mark.slow),
        pytest.param(Layout(shape="llama", experts="top2", dp=2, ep=2), marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_a_model_rewards_alike_on_every_layout(tmp_path, judge, rollouts, layout):
    settings = judged(judge, "run", reward_functions=(), **SEVERAL)
    one, rows = train(layout.serial, tmp_path, 3, settings), train(layout, tmp_path, 3, settings)
    assert np.abs(rollouts[0].noted["rewards"] - rollouts[-1].noted["rewards"]).max() < 1e-6
    for want, got in zip(one, rows, strict=True):
        assert got["reward"] == pytest.approx(want["reward"], rel=1e-5, abs=1e-6)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)


def test_a_run_with_a_reward_model_resumes_within_a_rollout(tmp_path, judge):
    settings = judged(judge, "hf", **SEVERAL)
    straight = train(ONE, tmp_path, 4, settings)
    stops = {**settings, "checkpoint": saved(tmp_path)}
    parts = train(ONE, tmp_path, 4, {**stops, "training": {"exit_interval": 3}})
    parts += train(ONE, tmp_path, 4, stops)
    names = ("reward", "policy_loss", "grad_norm")
    assert [[row[n] for n in names] for row in parts] == [[row[n] for n in names] for row in straight]


def test_a_folder_of_another_model_is_no_reward_model(tmp_path, judge):
    settings = judged(judge, "run")
    train(ONE, tmp_path, 3, {**settings, "policy": {}, "checkpoint": {"save": str(tmp_path / "words")}})
    refused = {
        "must be a decoder with one score, .* but .* holds another model": judged(tmp_path, "words"),
        r"must have the vocabulary of the policy, 17 tokens, .* but .* has \d+": {
            "policy": settings["policy"]
        },
        "take its 64 tokens, but .* takes 48": {**settings, "model": {"vocab_size": None, "seq_length": 64}},
        "look into|must hold a checkpoint|be a checkpoint": judged(tmp_path, "nothing"),
    }
    for told, given in refused.items():
        if "tokenizer" in given:
            given = {**given, "tokenizer": settings["tokenizer"]}
        with pytest.raises(CheckpointError, match=told):
            train(ONE, tmp_path, 3, given)
    with pytest.raises(ConfigError, match="the reward model of .* does not fit here"):
        train(Layout(shape="llama", tp=8), tmp_path, 3, settings)
