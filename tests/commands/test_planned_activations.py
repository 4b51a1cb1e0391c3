"""Activations on paper: what steps on a CPU take at most, measured, is what a plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.account.memory import MemoryMeter
from megazero.commands.memory_report import first_step, main, planned_memory
from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.mpu.context import solo_context
from megazero.mpu.streams import STILL
from megazero.plan.job import PlannedJob
from megazero.plan.words import shown
from megazero.train.build import build_model
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.step.timers import Timers

LLAMA = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 2 --num-query-groups 1 --ffn-hidden-size 192 "
    "--normalization RMSNorm --activation swiglu --position-embedding-type rope --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --bf16 --vocab-size 999 --mock-data --micro-batch-size 1 "
    "--global-batch-size 1 --lr 1e-3 --train-iters 1"
)
GPT = LLAMA.replace("RMSNorm", "LayerNorm").replace("swiglu", "gelu").replace(" rope", " learned_absolute")
GPT = GPT.replace(" --disable-bias-linear", "").replace("--num-query-groups 1", "").replace("--bf16 ", "")
FULL = "--recompute-granularity full"
LOSS = f"{FULL} --recompute-logits --recompute-logits-tiles 8"
ALL = f"{LOSS} --mlp-tiles auto"
# As many groups as heads: blocks that share a group's heads make gradients of their own on a GPU.
UNGROUPED = LLAMA.replace("--num-query-groups 1 ", "")
SETTINGS = ("", FULL, LOSS, ALL, f"{FULL} --recompute-num-layers 2", f"{FULL} --recompute-method block")


def configured(model: str, s: int, settings: str) -> Config:
    return parse_config(f"{model} --seq-length {s} {settings}".split(), world_size=1).config


def planned(config: Config) -> dict[str, int]:
    """Bytes of activations by place in a planned step."""
    places = planned_memory(first_step(config, 1))[0].places
    return {place: kinds["activations"] for place, kinds in places.items() if "activations" in kinds}


def measured(config: Config, *, apart: bool = False) -> dict[str, int]:
    """Bytes of activations by place in a step of real numbers; `apart`: as on a device with its own memory.

    Then nothing is copied, so that numbers mean nothing, but all memory is taken.
    """
    context = replace(solo_context(), streams=STILL) if apart else solo_context()
    plan = training_plan_of(config, 1)
    vocabulary = build_vocabulary(config)
    engine = build_model(vocabulary, context, config, plan)
    batches = PlannedJob(config, 1, apart, Progress(), "cpu").batches(
        context, plan.at(Progress()).micro_batches
    )
    meter = MemoryMeter.of(engine.optimizer.store, engine.executor)
    with meter.over_a_step():
        engine.train_step(batches, Progress(), Timers())
    return {place: kinds["activations"] for place, kinds in meter.sizes().items() if "activations" in kinds}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model", [UNGROUPED, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("s", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_a_step_takes_what_is_planned(s: int, model: str, settings: str) -> None:
    config = configured(model, s, settings)
    assert measured(config)["device"] == pytest.approx(planned(config)["device"], rel=0.01)


@pytest.mark.parametrize("settings", ["", FULL])
def test_heads_that_share_keys_take_what_is_planned(settings: str) -> None:
    config = configured(LLAMA, 1024, settings)
    assert measured(config)["device"] == pytest.approx(planned(config)["device"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("s", "settings"), [(16384, ""), (16384, FULL), (16384, ALL), (65536, ALL)])
def test_a_long_step_takes_what_is_planned(s: int, settings: str) -> None:
    config = configured(UNGROUPED, s, settings)
    assert measured(config)["device"] == pytest.approx(planned(config)["device"], rel=0.01)


def inputs_away(layers: int, s: int, device: str = "") -> Config:
    model = UNGROUPED.replace("--num-layers 3", f"--num-layers {layers}")
    return configured(model, s, f"{ALL} --checkpoint-in-cpu {device}")


@pytest.mark.parametrize("layers", [3, 6])
@pytest.mark.parametrize("s", [512, pytest.param(4096, marks=pytest.mark.slow)])
def test_inputs_on_the_host(s: int, layers: int) -> None:
    """All are there, and the device holds what a plan says."""
    there = measured(inputs_away(layers, s), apart=True)
    assert there["cpu"] == layers * s * 64 * 2
    plan = planned(inputs_away(layers, s, "--device cuda"))
    assert plan["cpu"] == there["cpu"]
    assert plan["device"] == pytest.approx(there["device"], rel=0.01)


def test_a_device_without_inputs_holds_two_of_them() -> None:
    """However many layers there are."""
    few, many = (planned(inputs_away(layers, 512, "--device cuda"))["device"] for layers in (3, 6))
    assert many == pytest.approx(few, rel=1e-4)


@pytest.mark.parametrize("settings", SETTINGS)
def test_bytes_are_linear_in_the_length(settings: str) -> None:
    """From 8K to 16K tokens what a plan takes doubles: nothing is s x s."""
    short, long = (planned(configured(LLAMA, s, settings))["device"] for s in (8192, 16384))
    assert short < long < 2.01 * short


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_report_says_the_peak(capsys, ranks: int) -> None:
    """Ranks that share a sequence have a part of its tokens."""
    flags = [*LLAMA.split(), *ALL.split(), *f"--seq-length 256 --context-parallel-size {ranks}".split()]
    assert main(["--nproc", str(ranks), "--", *flags]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    plan = first_step(parse_config(flags, world_size=ranks).config, ranks)
    took = shown(planned_memory(plan)[0].places["device"]["activations"])
    assert last == f"{256 // ranks} tokens of a rank take {took} of activations at most, at B0.0 on stage 0"
