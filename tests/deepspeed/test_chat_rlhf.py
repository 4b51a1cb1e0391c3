"""DeepSpeed-Chat's three steps by their names: they train on one rank and two, and its formulas hold."""

from __future__ import annotations

import json
import math
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from tests.forks import ROOT, run_ranks

pytest.importorskip("transformers")

SCRIPT = ROOT / "tests/deepspeed/programs/chat_rlhf.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_three_steps_train(ranks):
    done = run_ranks(*[["-m", "megazero.deepspeed", SCRIPT]] * ranks)
    assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
    for rank in done:
        line = next(line for line in rank.stdout.splitlines() if line.startswith("told:"))
        told = json.loads(line.removeprefix("told:"))
        assert fmean(told["imitation"][-3:]) < 0.8 * fmean(told["imitation"][:3])
        assert fmean(told["accuracy"][-5:]) > 0.95
        assert fmean(told["score"][-5:]) > fmean(told["score"][:5]) + 0.2


@pytest.fixture(scope="module")
def program():
    """The script's functions, in this process."""
    import importlib
    import sys

    import megazero.deepspeed

    before = sys.modules.get("deepspeed")
    sys.modules["deepspeed"] = megazero.deepspeed
    try:
        yield importlib.import_module("tests.deepspeed.programs.chat_rlhf")
    finally:
        sys.modules.pop("deepspeed")
        if before is not None:
            sys.modules["deepspeed"] = before


def test_rewards_advantages_and_losses_are_the_formulas_in_float64(program):
    """Written out token by token, for answers of unequal lengths behind prompts of three tokens."""
    torch.manual_seed(0)
    rows, columns, start = 3, 8, 2
    logs, known, values = (torch.randn(rows, columns).double() for _ in range(3))
    score = torch.tensor([0.5, 9.0, -7.0]).double()  # two beyond the clip
    lengths = [6, 4, 1]  # of answers, with the end of text
    mask = torch.tensor([[1.0 if t < start + n else 0.0 for t in range(columns)] for n in lengths])
    rewards = program.token_rewards(score, logs.clone(), known, mask.long(), start)
    for row, n in enumerate(lengths):
        values[row, start + n :] = 0
        for t in range(columns):
            wanted = -0.1 * float(logs[row, t] - known[row, t]) if t < start + n else 0.0
            wanted += max(-5.0, min(5.0, float(score[row]))) if t == start + n - 1 else 0.0
            assert float(rewards[row, t]) == pytest.approx(wanted, abs=1e-12), (row, t)
    gains, returns = program.advantages(values, rewards, start)
    for row in range(rows):
        for t in range(start, columns):
            total = 0.0
            for k in range(t, columns):
                after = float(values[row, k + 1]) if k + 1 < columns else 0.0
                delta = float(rewards[row, k]) + 1.0 * after - float(values[row, k])
                total += (1.0 * 0.95) ** (k - t) * delta
            assert float(gains[row, t - start]) == pytest.approx(total, abs=1e-12)
            assert float(returns[row, t - start]) == pytest.approx(total + float(values[row, t]), abs=1e-12)
    new, counted = logs[:, start:] + 0.4 * torch.randn(rows, columns - start), mask[:, start:].double()
    seen = values[:, start:] + 0.5 * torch.randn(rows, columns - start).double()
    actor = critic = 0.0
    for row in range(rows):
        for t in range(lengths[row]):
            ratio, gain = math.exp(float(new[row, t] - logs[row, start + t])), float(gains[row, t])
            actor += max(-gain * ratio, -gain * min(max(ratio, 0.8), 1.2))
            old, target, value = float(values[row, start + t]), float(returns[row, t]), float(seen[row, t])
            near = min(max(value, old - 0.2), old + 0.2)
            critic += 0.5 * max((value - target) ** 2, (near - target) ** 2)
    ours = program.actor_loss(new, logs[:, start:], gains, counted)
    assert float(ours) == pytest.approx(actor / sum(lengths), abs=1e-10)
    ours = program.critic_loss(seen, values[:, start:], returns, counted)
    assert float(ours) == pytest.approx(critic / sum(lengths), abs=1e-10)


def test_the_loss_of_pairs_is_megazero_s_per_token_loss(program):
    """Step 2's loss is `--reward-loss per_token` of `megazero finetune --task reward`."""
    from megazero.post_training.scores import shares_of

    torch.manual_seed(1)
    tokens = torch.randint(1, 16, (2, 3, 9))
    tokens[1, :, :4] = tokens[0, :, :4]
    tokens[1, :, 4] = (tokens[0, :, 4] + 1) % 16
    scores, ends = torch.randn(2, 3, 9).double(), [9, 9, 9]
    shares = torch.from_numpy(shares_of(tokens.permute(1, 0, 2).numpy(), torch.tensor([[9, 9]] * 3).numpy()))
    wanted = -(torch.nn.functional.logsigmoid(scores[0] - scores[1]) * shares).sum() / 3
    assert float(program.pair_loss(*scores, *tokens, ends)) == pytest.approx(float(wanted), rel=1e-6)


def test_more_inference_ranks_than_the_layout_s_are_refused_by_name(program, monkeypatch):
    from megazero.deepspeed import initialize
    from megazero.errors import ConfigError

    alone = SimpleNamespace(get_world_size=lambda: 1)
    monkeypatch.setattr(program.deepspeed, "comm", alone, raising=False)
    model = program.llama(program.LlamaForCausalLM)
    config = program.ds_config(3, hybrid=True, inference_tp_size=2)
    with pytest.raises(ConfigError, match="autotp_size"):
        initialize(model=model, model_parameters=model.parameters(), config=config)
