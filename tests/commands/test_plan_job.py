"""`megazero plan` of a whole training: the report, the files, the exit status, bad input."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megazero.commands.plan import main
from megazero.config.resolve import parse_config
from megazero.plan.device import Device
from megazero.plan.report import report_on
from megazero.plan.words import money
from tests.tables import over_table

GPT = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --hidden-dropout 0 "
    "--attention-dropout 0 --tensor-model-parallel-size 8 --sequence-parallel --zero-stage 1 --bf16 "
    "--pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 3 --recompute-activations "
    "--micro-batch-size 1 --global-batch-size 128 --train-samples 146484375 --lr 6e-5 --mock-data "
    "--vocab-file vocab.json --merge-file merges.txt"
)
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 100 --mock-data "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 10 --pipeline-model-parallel-size 2"
)


@pytest.mark.slow
def test_a_job_of_1024_gpus_is_planned_from_its_flags_alone(tmp_path, capsys):
    """Without a tokenizer's files: GPT-2's have 50,257 tokens."""
    status = main(["--nproc", "1024", "--device", "a100-80g", "--output", str(tmp_path), "--", *GPT.split()])
    said, progress = capsys.readouterr()
    assert status == 0
    assert progress.splitlines()[1:] == [f"traced {n} of 3 kinds of stages" for n in (1, 2, 3)]
    assert said.startswith(
        "174.62B parameters on 1,024 x a100-80g: T8 x P16 x V2 x D8, ZeRO 1, interleaved; 16 "
    )
    assert "\nfits: " in said
    assert "300.00B tokens" in said
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["fits"] is True
    assert [stage["stage"] for stage in plan["stages"]] == list(range(16))
    assert sum(plan["stages"][0]["memory"]["device"].values()) < 40 * 2**30
    assert {path.name for path in tmp_path.iterdir()} == {
        "plan.json",
        "trace.json",
        "timeline.svg",
        "memory.svg",
    }


@pytest.mark.slow
def test_what_does_not_fit_has_a_status_of_its_own(capsys):
    words = [word for word in GPT.split() if word not in ("--num-layers-per-virtual-pipeline-stage", "3")]
    words = ["--fp16" if word == "--bf16" else word for word in words]
    words += ["--num-layers", "16", "--pipeline-model-parallel-size", "2", "--zero-stage", "0"]
    assert main(["--nproc", "16", "--device", "v100-32g", "--", *words]) == 3
    said = capsys.readouterr().out
    assert "does not fit: " in said
    assert "the nearest layouts that fit:\n  T8 x P2" in said


@pytest.mark.parametrize(
    ("own", "training", "said"),
    [
        (["--nproc", "2"], None, "`CONFIG` must be a YAML file of a training, or its flags must follow"),
        (["--nproc", "2", "--device", "abacus"], SMALL, "`--device` must be one of a100-40g,"),
        (["--nproc", "3"], SMALL, "must be a multiple of"),
    ],
)
def test_bad_input_is_refused(own, training, said, capsys):
    words = own if training is None else [*own, "--", *training.split()]
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_batch_that_grows_takes_longer_for_as_many_tokens(tmp_path):
    """Trap 8: time to train is an integral over the ramp."""
    days, flags = [], GPT.replace("--num-layers-per-virtual-pipeline-stage 3", "").split()
    for ramp in ([], ["--rampup-batch-size", "8", "8", "73242187"]):
        assert main(["--nproc", "1024", "--output", str(tmp_path), "--", *flags, *ramp]) == 0
        days.append(json.loads((tmp_path / "plan.json").read_text())["training_seconds"])
    assert days[1] > 1.02 * days[0]


def test_a_price_makes_costs_of_the_times():
    config = parse_config(SMALL.split(), world_size=2).config
    free = report_on(config, 2, Device.load("a100-80g"), 8)
    plan = replace(free, price=1800.0).document()  # with two devices, a second costs 1
    assert plan["price_per_hour"] == 1800
    assert plan["cost_per_step"] == pytest.approx(plan["seconds_per_step"])
    assert plan["cost_of_training"] == pytest.approx(plan["training_seconds"])
    assert plan["cost_per_billion_tokens"] == pytest.approx(1e9 / plan["tokens_per_second"])
    cost = dict(replace(free, price=1800.0).facts())["cost"]
    figures = [plan[name] for name in ("cost_of_training", "cost_per_step", "cost_per_billion_tokens")]
    assert cost == "{}; {} a step, {} for 1B tokens".format(*map(money, figures))
    assert "cost" not in dict(free.facts())
    assert free.document().keys() < plan.keys()


@pytest.mark.slow
def test_the_flag_is_the_price(tmp_path, capsys):
    own = ["--nproc", "2", "--device", "a100-80g", "--price-per-hour", "2.5", "--output", str(tmp_path)]
    assert main([*own, "--", *SMALL.split()]) == 0
    assert "for 1B tokens" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["price_per_hour"] == 2.5


@over_table("price", ["0", "-2", "much", "inf", "nan"])
def test_a_price_is_a_number_above_0(price, capsys):
    with pytest.raises(SystemExit):
        main(["--nproc", "2", "--price-per-hour", price, "--", *SMALL.split()])
    assert f"must be a number above 0, but is {price}" in capsys.readouterr().err


def test_amounts_have_the_digits_that_matter():
    assert [money(x) for x in (1234567.891, 1.0, 0.5, 0.00312)] == ["1,234,567.89", "1.00", "0.5", "0.0031"]
