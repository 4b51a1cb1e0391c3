"""Trainings by policy gradients: the law, resumes, references, cut distributions, rewards that fail."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.checkpoint.folder import latest_iteration
from megazero.config.resolve import parse_config
from megazero.errors import CheckpointError, ConfigError, DataError, NumericsError
from megazero.mpu.context import solo_context
from megazero.ops import native
from megazero.post_training.policy.cycle import Cycle
from megazero.post_training.policy.prompts import Prompts, read_prompts
from megazero.post_training.policy.rewards import Rewards
from megazero.post_training.policy.rollout import Drawing
from megazero.post_training.policy.run import policy_on, train_policy
from tests.layouts.layout import Layout
from tests.post_training.policy.toy import ANSWER, config_of, curve, train

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")

ONE = Layout(shape="llama", micro_batch=8)
EXACT = (
    "reward",
    "policy_loss",
    "grad_norm",
    "surprisal",
    "log_ratio",
    "clipped",
    "kl_loss",
    "answer_length",
)
SEVERAL = {"prompts_per_rollout": 4, "rollout_iterations": 2}


def figures(rows: list[dict]) -> list[dict]:
    return [{name: row[name] for name in EXACT if name in row} for row in rows]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / f"iter_{latest_iteration(folder):07d}"
    return {f"{p.stem}/{k}": v for p in sorted(path.glob("*.safetensors")) for k, v in load_file(p).items()}


def saved(folder: Path, **checkpoint) -> dict:
    return {"save": str(folder / "run"), "load": str(folder / "run"), **checkpoint}


def test_the_toy_learns_to_say_what_is_rewarded(tmp_path):
    """And the ratios of first updates are 1: nothing is clipped, and no log-probability is another."""
    sections = {
        "policy": {"group_size": 8},
        "batch": {"global_batch_size": 64, "micro_batch_size": 64},
        "optimizer": {"lr": 2e-2, "lr_warmup_iters": 0, "weight_decay": 0.0, "lr_decay_style": "constant"},
    }
    rows = train(ONE, tmp_path, 14, sections)
    assert rows[0]["reward"] < 0.2
    assert rows[-1]["reward"] > 0.9
    assert all(row["apart"] == row["clipped"] == row["log_ratio"] == 0.0 for row in rows)


def test_a_run_that_stops_within_a_rollout_goes_on_bit_for_bit(tmp_path):
    """Traps 13 and 15: the later updates of a rollout compare with what its answers had when drawn."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    straight = train(ONE, tmp_path / "whole", 6, {"policy": SEVERAL, "checkpoint": saved(tmp_path / "whole")})
    stops = {"policy": SEVERAL, "checkpoint": saved(tmp_path / "parts"), "training": {"exit_interval": 3}}
    first = train(ONE, tmp_path / "parts", 6, stops)
    assert latest_iteration(tmp_path / "parts" / "run") == 3
    other = {**stops, "policy": {**SEVERAL, "prompts": (str(tmp_path / "other.jsonl"),)}}
    (tmp_path / "other.jsonl").write_text('{"prompt": "1 2"}\n')
    with pytest.raises(
        CheckpointError, match="`prompts` must hold the prompts that the checkpoint was trained"
    ):
        train(ONE, tmp_path / "parts", 6, other)
    second = train(ONE, tmp_path / "parts", 6, {**stops, "training": {}})
    assert figures(first + second) == figures(straight)
    assert straight[3]["log_ratio"] > 1e-3, "the fourth update is off-policy"
    a, b = tensors(tmp_path / "whole" / "run"), tensors(tmp_path / "parts" / "run")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_rollout_that_is_lost_is_missed(tmp_path, monkeypatch):
    stops = {"policy": SEVERAL, "checkpoint": saved(tmp_path), "training": {"exit_interval": 3}}
    train(ONE, tmp_path, 6, stops)
    monkeypatch.setattr(Cycle, "resume", lambda cycle, facts: None)
    with pytest.raises(CheckpointError, match="`rollout` must be in the checkpoint after 24 samples"):
        train(ONE, tmp_path, 6, stops)


def test_the_reference_does_not_drift(tmp_path):
    """Trap 10: the divergence from the initial weights is 0 at first, and grows; a resume goes on with it."""
    train(ONE, tmp_path, 3, {"checkpoint": {"save": str(tmp_path / "start")}})
    start = {"load": str(tmp_path / "start"), "finetune": True, "save": str(tmp_path / "run")}
    policy = {"kl_coef": 0.05, "reference": str(tmp_path / "start")}
    rows = train(ONE, tmp_path, 4, {"policy": policy, "checkpoint": start})
    divergences = [row["kl_loss"] for row in rows]
    assert abs(divergences[0]) < 1e-9
    assert divergences[-1] > 1e-4
    early = {"policy": policy, "training": {"exit_interval": 2}}
    train(ONE, tmp_path, 4, {**early, "checkpoint": {**start, "save": str(tmp_path / "parts")}})
    again = {"save": str(tmp_path / "parts"), "load": str(tmp_path / "parts")}
    rest = train(ONE, tmp_path, 4, {"policy": policy, "checkpoint": again})
    assert figures(rest) == figures(rows[2:])
    in_reward = {**policy, "kl_in": "reward", "kl_coef": 1.0}
    rows = train(ONE, tmp_path, 3, {"policy": in_reward, "checkpoint": {**start, "save": None}})
    assert "kl_loss" not in rows[0], "it is only reported"


@pytest.mark.parametrize(
    "drawn",
    [
        {"rollout_temperature": 0.7},
        {"rollout_top_p": 0.8},
        {"rollout_top_k": 5, "rollout_min_p": 0.05, "rollout_temperature": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "layout",
    [ONE, pytest.param(Layout(shape="llama", tp=2), marks=pytest.mark.slow)],
    ids=lambda layout: layout.name,
)
def test_the_ratio_is_one_for_any_distribution_that_answers_are_drawn_from(tmp_path, layout, drawn):
    rows = train(layout, tmp_path, 3, {"policy": drawn})
    most = 0.0 if layout.tp == 1 else 1e-6
    assert all(row["apart"] == 0.0 and 0.0 <= row["log_ratio"] <= most for row in rows)


def test_a_rollout_with_other_log_probabilities_ends_the_run(tmp_path, monkeypatch):
    """Traps 1, 2 and 16, planted: weights of an earlier update, or a shift by one, would look like this."""
    drawn = Drawing.__call__

    def shifted(self, prompts, first):
        rollout = drawn(self, prompts, first)
        rollout.logs[0, rollout.prompts[0] - 1] += 1e-4 if first else 0.0
        return rollout

    monkeypatch.setattr(Drawing, "__call__", shifted)
    with pytest.raises(
        NumericsError, match=r"must be those of training to 2e-06, but .*% of the tokens of iteration 2 "
    ):
        train(ONE, tmp_path, 3)
    rows = train(ONE, tmp_path, 3, {"policy": {"check_rollout": "warn"}})
    assert [row["apart"] > 0 for row in rows] == [False, True, True]


def test_dropout_is_off_in_answers_and_their_updates(tmp_path):
    """Trap 9."""
    rows = train(Layout(shape="llama", micro_batch=8, dropout=0.3), tmp_path, 3)
    assert all(row["log_ratio"] == 0.0 for row in rows)


def test_truncated_answers_and_equal_groups_leave_the_loss(tmp_path):
    """Trap 17. Their tokens are in no divisor, either: with nothing left there is no update."""
    nothing = {"reward_functions": (f"{__name__}:nothing",), "drop_equal_groups": True}
    rows = train(ONE, tmp_path, 3, {"policy": nothing})
    assert all(row["policy_loss"] is None and row["equal_groups"] == 1.0 and row["skipped"] for row in rows)
    rows = train(ONE, tmp_path, 3, {"policy": {"mask_truncated": True, "max_answer_tokens": 2}})
    assert any(row["truncated"] > 0 for row in rows)


def nothing(completions, **rest):
    return [0] * len(completions)


def fails(completions, **rest):
    raise KeyError("answer")


def sleeps(completions, **rest):
    time.sleep(5)
    return [1.0] * len(completions)


def some(completions, answer, **rest):
    """Rewards by a column of the file; None where it does not apply."""
    return [None if a % 2 else float(a) for a in answer]


def test_rewards_that_fail_are_no_rewards_and_are_counted(tmp_path, capsys):
    functions = tuple(f"{__name__}:{name}" for name in ("fails", "some"))
    rows = train(ONE, tmp_path, 3, {"policy": {"reward_functions": functions}})
    assert all(row["failed_rewards"] == 1.0 for row in rows)
    assert "fails raised KeyError: 'answer'; its answers have no reward by it" in capsys.readouterr().out
    with pytest.raises(DataError, match="must reward an answer, but none of 8 has a reward: .*KeyError"):
        train(ONE, tmp_path, 3, {"policy": {"reward_functions": functions[:1]}})


def test_reward_functions_get_what_trl_gives_them(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "seen = []\n"
        "def judge(prompts, completions, completion_ids, **columns):\n"
        "    seen.append((prompts, completions, completion_ids, columns))\n"
        "    return [1, None, float('nan'), True]\n"
    )
    rewards = Rewards.of([f"{path}:judge"], 5.0)
    prompts = [
        prompt_of("a", level=1),
        prompt_of("b"),
        prompt_of([{"role": "user", "content": "c"}]),
        prompt_of("d"),
    ]
    values = rewards(prompts, ["1", "2", "3", "4"], [[1], [2, 9], [3], [4]])
    assert values[[0, 3], 0].tolist() == [1.0, 1.0]
    assert str(values[1:3, 0]) == "[nan nan]"
    given = rewards.functions[f"{path}:judge"].__globals__["seen"][0]
    assert given[0] == ["a", "b", [{"role": "user", "content": "c"}], "d"]
    assert given[1] == ["1", "2", [{"role": "assistant", "content": "3"}], "4"]
    assert given[2] == [[1], [2, 9], [3], [4]]  # trap 5: the sampled ids, not those of the text
    assert given[3] == {"level": [1, None, None, None]}
    slow = Rewards({"slow": sleeps}, 0.05)
    assert str(slow(prompts[:1], ["1"], [[1]])) == "[[nan]]"
    assert slow.failures == ["slow took longer than 0.05 s"]
    short = Rewards({"short": lambda **given: [1.0]}, 5.0)
    short(prompts, ["1", "2", "3", "4"], [[1]] * 4)
    assert short.failures == ["short raised ValueError: 1 rewards for 4 answers"]


def prompt_of(said, **columns):
    from megazero.post_training.policy.prompts import Prompt

    return Prompt((1, 2), said, columns)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "must be module:function or file.py:function, but has 'nothing'"),
        ("no_such_module:f", "cannot be|cannot \\(ModuleNotFoundError"),
        (f"{__name__}:ONE", "must name a function, but"),
        ("/no/file.py:f", "FileNotFoundError"),
    ],
)
def test_a_reward_function_that_is_not_there_is_refused(name, told):
    with pytest.raises(ConfigError, match=told):
        Rewards.of([name], 1.0)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("", "`prompts` must hold a prompt, but .* holds none"),
        ("{}\n", "line 1: `prompt` must be a list of messages, but is missing; correct the line"),
        ("\n[1]\n", "line 2: it must be an object, but is a list"),
        ('{"prompt": ""}\n', "line 1: its prompt must have 1 to 8 tokens, .* but has 0"),
        ('{"prompt": "1 2 3 4 5 6 7 8 9"}\n', "must have 1 to 8 tokens, `seq_length` less .* but has 9"),
        (
            '{"prompt": [{"role": "user", "content": "x"}]}\n',
            "messages need a tokenizer with a chat template",
        ),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(tmp_path, lines, told):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines)
    config = config_of(ONE, tmp_path, 3, {"policy": {"prompts": (str(path),)}})
    with pytest.raises(DataError, match=told):
        policy_on(config, solo_context())


def test_each_epoch_has_each_prompt_once_in_an_order_of_its_own(tmp_path):
    from megazero.train.parts.vocabulary import build_vocabulary

    config = config_of(ONE, tmp_path, 3)
    prompts = read_prompts(config, build_vocabulary(config).tokenizer)
    epochs = [[prompts.at(i).columns["answer"] for i in range(n, n + 16)] for n in (0, 16)]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert Prompts(prompts.prompts, 8).at(0) is not None
    assert prompts.digest != Prompts(prompts.prompts[:15], 7).digest


LINE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --vocab-size 16 --tokenizer-type "
    "NullTokenizer --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --train-iters 3"
)
WHOLE = "--policy-method grpo --prompts p --reward-functions a:b --group-size 4 --max-answer-tokens 8"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (WHOLE.replace("--reward-functions a:b", ""), "`reward_functions` must name a function"),
        (WHOLE.replace("--prompts p", ""), "`prompts` must name a file"),
        (WHOLE.replace("size 4", "size 1"), "greater than or equal to 2|at least 2"),
        (WHOLE.replace("size 4", "size 3"), "`global_batch_size` must be a multiple of `group_size`"),
        (WHOLE.replace("tokens 8", "tokens 16"), "`max_answer_tokens` must be less than `seq_length`"),
        (f"{WHOLE} --kl-coef 0.1", "`reference` must be set with `kl_coef`"),
        (f"{WHOLE} --reward-weights 1 2", "`reward_weights` must be as many as `reward_functions`"),
        (f"{WHOLE} --model-family bert", "`family` must be gpt"),
        ("--mock-data --kl-coef 0.1", "`policy_method` must be set"),
    ],
)
def test_settings_that_do_not_fit_are_refused(flags, told):
    with pytest.raises(ConfigError, match=told):
        parse_config(f"{LINE} {flags}".split(), world_size=1)


def test_without_a_method_there_is_nothing_to_run():
    config = parse_config(f"{LINE} --mock-data".split(), world_size=1).config
    with pytest.raises(ConfigError, match="`policy_method` must be set for `megazero rl`"):
        train_policy(config)


def test_the_metrics_of_a_run_are_in_its_file(tmp_path):
    rows = train(ONE, tmp_path, 3)
    assert curve(tmp_path) == rows
    assert {"reward", "reward_std", "answer_length", "truncated", "equal_groups", "clipped"} <= rows[0].keys()
    assert 0 < rows[0]["answer_length"] <= ANSWER
    assert json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[0])["prompt"] == "0 0"
