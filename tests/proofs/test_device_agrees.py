"""The rows that compare a GPU with a CPU: each agrees with itself, and none does when one side is spoilt."""

from __future__ import annotations

import sys

import pytest
import torch

from megazero.train.process import choose_products
from megazero.verify.record import Record
from proofs import device_agrees
from proofs.device_agrees import Bench, checks
from proofs.verdicts import bits, curve, near, same_tensors

CHECKS = dict(checks("aot_eager"))
# One of each kind in the default suite.
FEW = {
    *("fp32 gpt with GQA and rotary", "fp32 gpt with documents", "fp32 bert packed", "fp32 experts top2"),
    *("dropout masks", "initial weights", "zero 3 = 0, bf16", "recompute full = none"),
    *("graphs = launches", "offload to disk = to host", "fp32 lion", "saved beside training = saved"),
    *("resumed = straight", "bf16 curve llama", "fp8 curve delayed near bf16"),
    *("fp32 products with codes", "fp32 scored, int8 cache", "fp32 rewards last token"),
}


@pytest.fixture(autouse=True)
def process_as_before():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)
    choose_products(tf32=False)


ROWS = [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in CHECKS]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_fails_when_one_side_is_spoilt(name):
    """By a learning rate that is 5% higher; loss curves see less, so by a tenfold one and another seed."""
    spoil = 9.0 if "curve" in name else 0.05
    assert CHECKS[name](Bench("cpu", wide=False, spoil=spoil)).used > 1


@pytest.mark.parametrize(
    "name", ["fp32 experts top2", "graphs = launches", "bf16 curve llama", "resumed = straight"]
)
def test_a_row_agrees_when_neither_is(name):
    assert CHECKS[name](Bench("cpu", wide=False)).used == 0


def test_the_list_has_every_kind_of_experts_and_each_stage():
    assert len(CHECKS) >= 71
    assert CHECKS.keys() >= FEW
    assert {f"zero {stage} = 0" for stage in (1, 2, 3)} <= CHECKS.keys()
    assert {f"fp32 experts {name}" for name in ("top2", "first-come", "biased", "noisy")} <= CHECKS.keys()


@pytest.mark.parametrize("name", ["fp32 gpt with dropout", "graphs = launches", "compiled near eager"])
def test_wide_models_are_those_of_a_gpu(name, monkeypatch):
    """Heads of 64, and dims that products of 8-bit floats take."""
    configs = []

    def train(bench, side, *, second):
        configs.append(bench.config(side, second=second))
        return record()

    monkeypatch.setattr(Bench, "train", train)
    CHECKS[name](Bench("cpu", wide=True))
    assert len(configs) == 2
    for config in configs:
        assert config.model.hidden_size // config.model.num_attention_heads == 64
        assert config.model.ffn_hidden_size % 16 == 0


def record(losses=(1.0,), weight=1.0):
    tensors = [{"w": torch.full((4,), weight)} for _ in losses]
    return Record(
        [{"lm loss": loss, "entropy": 3 * loss} for loss in losses], [1.0] * len(losses), tensors, tensors
    )


def test_verdicts_see_what_they_must():
    assert bits(record(), record()).used == 0
    assert bits(record(), record(weight=1 + 2**-23)).used == float("inf")
    assert bits(record(), record((1 + 2**-52,))).used == float("inf")
    assert near(record(), record(weight=1.0005)).used == pytest.approx(0.5, rel=0.02)
    assert near(record(), record(weight=1.01)).used > 1
    assert near(record(), record(weight=float("nan"))).used == float("inf")
    assert curve(record((2.0, 1.0)), record((2.0, 1.03)), 0.01).used == pytest.approx(2.9, rel=0.01)
    assert curve(record((float("nan"),)), record(), 0.01).used == float("inf")
    assert curve(record((0.0,)), record((0.01,)), 0.01).used == pytest.approx(10)
    assert same_tensors({}, {}).used == float("inf")
    assert same_tensors({"a": torch.ones(1)}, {"b": torch.ones(1)}).used == float("inf")


def test_the_command_says_which_rows_are_bad(monkeypatch, capsys, tmp_path):
    lines = {
        "a": {"used": 0.5, "where": "here"},
        "b": {"used": 2.0, "where": "there"},
        "c": {"failed": "it hung"},
    }
    monkeypatch.setattr(device_agrees, "checks", lambda backend: [(name, None) for name in "abcd"])
    monkeypatch.setattr(
        device_agrees,
        "run_rows",
        lambda work, rows, *_: [(n, lines.get(n, {"left_out": "late"})) for n in rows],
    )
    for chosen, status in (("a", 0), ("b", 1), ("c", 1), ("d", 1)):
        monkeypatch.setattr(
            sys, "argv", ["x", "--dry-run", "--only", chosen, "--output", str(tmp_path / "o")]
        )
        assert device_agrees.main() == status
    words = capsys.readouterr().out
    assert "ok  a" in words
    assert "BAD b" in words
    assert "BAD c" in words
    assert "BAD d" in words
    assert (tmp_path / "o").read_text().count("\n") == 4
