"""The z-loss of the output logits on every layout, against its formula, and what a resume makes of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.errors import ConfigError
from megazero.models.chunk import StagedChunk
from megazero.mpu.context import solo_context
from megazero.verify.compare import compare
from megazero.verify.record import Record, micro_batches, verification_engine
from megazero.verify.run import run_alone, run_in_threads
from tests.layouts.layout import Layout

LAYOUTS = [
    Layout(tp=2, sequence_parallel=True, dropout=0.1),
    Layout(tp=2, pp=2, dp=2, zero=3, schedule="zb-h1", shape="llama"),
    Layout(pp=2, schedule="zb-v", layers=4, untied=True, recompute="full"),
    Layout(cp=2, documents=True, shape="llama", micro_batch=2),
    Layout(tp=2, shape="bert", dropout=0.1),
    Layout(tp=2, pp=2, shape="t5"),
    Layout(tp=2, dp=2, ep=2, zero=1, experts="top2"),
    Layout(tp=2, pp=2, shape="deepseek"),
]


def config_of(layout: Layout, weight: float, *, blocks: bool = False) -> Config:
    config = layout.config()
    model = config.model.model_copy(update={"z_loss_coeff": weight})
    recompute = config.recompute.model_copy(update={"logits": blocks})
    return config.model_copy(update={"model": model, "recompute": recompute})


@cache
def serial(layout: Layout, weight: float) -> Record:
    return run_alone(config_of(layout, weight))


def check(layout: Layout, **how: bool) -> None:
    records = run_in_threads(config_of(layout, 0.05, **how), layout.grid)
    bad = [str(d) for d in compare(records, serial(layout.serial, 0.05)) if d.share > 1]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:])],
    ids=lambda layout: layout.name,
)
def test_layout_equals_one_process(layout):
    assert not layout.broken_rules()
    check(layout)


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], *(pytest.param(LAYOUTS[i], marks=pytest.mark.slow) for i in (1, 7))],
    ids=lambda layout: layout.name,
)
def test_without_whole_logits_it_is_the_same(layout):
    check(layout, blocks=True)


@pytest.mark.parametrize("shape", ["gpt2", "bert", "t5"])
def test_its_term_is_the_mean_of_the_squares_and_trains(shape):
    """Of the tokens that count, by the model's own logits in fp64."""
    layout = Layout(shape=shape)
    config, context = config_of(layout, 0.05), solo_context()
    plan = training_plan_of(config, 1)
    engine = verification_engine(config, plan, context)
    (chunk,) = engine.executor.chunks.values()
    assert isinstance(chunk, StagedChunk)
    total = count = 0.0
    for batch in micro_batches(config, context, plan.at(plan.before(0))):
        with torch.no_grad():
            logits = chunk(batch)
        logits = (logits[0] if isinstance(logits, tuple) else logits)[..., : chunk.vocab_size]
        squares = torch.logsumexp(logits.double(), -1).square()
        if shape != "bert":
            learnt = batch.decoder.learnt if shape == "t5" else batch.learnt
            squares = learnt.weighted(squares)
        total, count = total + squares.sum().item(), count + batch.counts["lm"]
    losses = serial(layout, 0.05).losses
    assert losses[0]["logit_z loss"] == pytest.approx(total / count, rel=1e-6)
    first, plain = losses[0], serial(layout, 0.0).losses
    others = sum(first[name] for name in ("lm loss", "sop loss") if name in first)
    assert first["total loss"] == pytest.approx(others + 0.05 * first["logit_z loss"], rel=1e-6)
    assert (first["lm loss"], "logit_z loss" in plain[0]) == (plain[0]["lm loss"], False)
    assert losses[-1]["lm loss"] != plain[-1]["lm loss"]


def test_a_classifier_has_none():
    line = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1 "
    )
    line += "--task MNLI --z-loss-coeff 0.1 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
    with pytest.raises(ConfigError, match="others train no likelihood of words"):
        parse_config(line.split(), world_size=1)
