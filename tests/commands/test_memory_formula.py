"""The formula of activations: what steps on a CPU take at most, measured, is what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.commands.memory_report import main
from megazero.commands.memory_report.formula import activation_bytes, stated
from megazero.commands.memory_report.planned import planned_memory
from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.mpu.context import solo_context
from megazero.mpu.streams import STILL
from megazero.plan.job import Job
from megazero.train.build import build_model
from megazero.train.observe.memory import MemoryMeter
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
SETTINGS = ("", FULL, LOSS, ALL, f"{FULL} --recompute-num-layers 2", f"{FULL} --recompute-method block")


def configured(model: str, s: int, settings: str) -> Config:
    return parse_config(f"{model} --seq-length {s} {settings}".split(), world_size=1).config


def formula(config: Config, *, apart: bool = False) -> int:
    return activation_bytes(config, build_vocabulary(config).padded, apart=apart).most


def measured(config: Config, *, apart: bool = False) -> dict[str, int]:
    """Bytes of activations by place in a step of real numbers; `apart`: as on a device with its own memory.

    Then nothing is copied, so that numbers mean nothing, but all memory is taken.
    """
    context = replace(solo_context(), streams=STILL) if apart else solo_context()
    plan = training_plan_of(config, 1)
    vocabulary = build_vocabulary(config)
    engine = build_model(vocabulary, context, config, plan)
    batches = Job(config, 1, apart, Progress(), "cpu").batches(context, plan.at(Progress()).micro_batches)
    meter = MemoryMeter.of(engine)
    with meter.over_a_step():
        engine.train_step(batches, Progress(), Timers())
    return {place: kinds["activations"] for place, kinds in meter.sizes().items() if "activations" in kinds}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("s", [1024, 4096])
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_step_takes_what_the_formula_says(model: str, s: int, settings: str) -> None:
    config = configured(model, s, settings)
    assert measured(config)["device"] == pytest.approx(formula(config), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["", FULL, ALL])
def test_a_step_of_16k_tokens_takes_what_the_formula_says(settings: str) -> None:
    config = configured(LLAMA, 16384, settings)
    assert measured(config)["device"] == pytest.approx(formula(config), rel=0.03)


@pytest.mark.slow
def test_a_step_of_64k_tokens_takes_what_the_formula_says() -> None:
    config = configured(LLAMA, 65536, ALL)
    assert measured(config)["device"] == pytest.approx(formula(config), rel=0.03)


@pytest.mark.parametrize("layers", [3, 6])
def test_inputs_on_the_host(layers: int) -> None:
    """On the device two of them, however many layers; on the host all, as a plan says."""
    settings = f"{ALL} --checkpoint-in-cpu --num-layers {layers}"
    # As many groups as heads: blocks that share a group's heads make gradients of their own on a GPU.
    model = LLAMA.replace("--num-layers 3", "").replace("--num-query-groups 1", "")
    config = configured(model, 4096, settings)
    there = measured(config, apart=True)
    assert there["device"] == pytest.approx(formula(config, apart=True), rel=0.03)
    assert there["cpu"] == layers * 4096 * 64 * 2
    plan = configured(model, 4096, f"{settings} --device cuda")
    places = planned_memory(plan, 1)[0].places
    assert places["cpu"]["activations"] == there["cpu"]
    assert places["device"]["activations"] == pytest.approx(there["device"], rel=0.01)
    few, many = (
        formula(configured(LLAMA.replace("layers 3", f"layers {n}"), 4096, settings), apart=True)
        for n in (3, 6)
    )
    assert few == many


@pytest.mark.parametrize("settings", SETTINGS)
def test_bytes_are_linear_in_the_length(settings: str) -> None:
    """From 8K to 16K tokens what a plan takes doubles: nothing is s x s."""
    short, long = (
        planned_memory(configured(LLAMA, s, settings), 1)[0].places["device"]["activations"]
        for s in (8192, 16384)
    )
    assert short < long < 2.01 * short


def test_ranks_that_share_a_sequence_have_a_part_of_the_tokens() -> None:
    whole = configured(LLAMA, 4096, ALL)
    parallel = whole.parallel.model_copy(update={"context_parallel_size": 4})
    cut = whole.model_copy(update={"parallel": parallel})
    assert formula(cut) == formula(configured(LLAMA, 1024, ALL))


@pytest.mark.parametrize(
    "settings",
    ["--hidden-dropout 0.1", "--recompute-granularity selective", "--num-experts 2", "--random-ltd"],
)
def test_what_the_formula_does_not_speak_of(settings: str) -> None:
    if "random" in settings:
        settings += " --random-ltd-layer-id 1 --random-ltd-min-value 64 --random-ltd-require-steps 4"
    assert not stated(configured(LLAMA.replace("--hidden-dropout 0 ", ""), 1024, settings))
    assert stated(configured(LLAMA, 1024, ""))


def test_the_report_says_it(capsys) -> None:
    assert main(["--nproc", "1", "--", *LLAMA.split(), *ALL.split(), "--seq-length", "4096"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("by the formula of docs/memory.md, 4,096 tokens of a rank take ")
    assert last.endswith(" at the MLP")
