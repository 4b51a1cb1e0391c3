"""Figures of a step that are no sums: the largest attention logit on any rank, and the factor of clipping."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.logging import LoggingConfig
from megazero.errors import ConfigError
from megazero.mpu.context import thread_context
from megazero.mpu.launch import Launch
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.observe.metrics import METRICS
from megazero.train.observe.peak import Peak
from megazero.train.pretraining import pretrain
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.layouts.layout import Layout

LOGITS = next(metric for metric in METRICS if metric.name == "max_attention_logit")
SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 3 --lr 1e-2 --tokenizer-type NullTokenizer --vocab-size 15 "
    "--mock-data --eval-iters 0 --clip-grad 0.5 --init-method-std 0.3"
)


def test_a_peak_is_the_largest_of_all_ranks_and_begins_anew():
    world = ThreadWorld(3, 20.0)

    def work(rank: int) -> list[float | None]:
        peak, group = Peak(torch.device("cpu")), world.group("world", rank, (0, 1, 2))
        taken = [peak.take(group)]
        for number in (1.0 - rank, -4.0):
            peak.note(torch.tensor(number))
        taken.append(peak.take(group))
        if rank == 2:
            peak.note(torch.tensor(-7.0, dtype=torch.float64))
        return [*taken, peak.take(group), peak.take(group)]

    assert world.run(work) == [[None, 1.0, -7.0, None]] * 3


def test_nan_is_the_largest():
    peak = Peak(torch.device("cpu"))
    for number in (1.0, math.nan, 2.0):
        peak.note(torch.tensor(number))
    assert math.isnan(peak.take(SoloGroup()))


def peaks_of(layout: Layout, steps: int = 2) -> list[float]:
    """The largest attention logit of each step, the same on all ranks."""
    config = layout.config().model_copy(update={"logging": LoggingConfig(log_max_attention_logit=True)})
    world = ThreadWorld(layout.world_size)

    def work(rank: int) -> list[float]:
        context = thread_context(world, layout.grid, rank)
        plan = training_plan_of(config, context.data.size)
        engine, state, found = verification_engine(config, plan, context), TrainState(), []
        peak = LOGITS.of.watch(config, engine)
        for _ in range(steps):
            step = plan.at(state.progress)
            batches = micro_batches(config, context, step)
            result = engine.train_step(batches, state.progress, Timers())
            engine.evaluate([micro_batches(config, context, plan.at(TrainState().progress))])
            found.append(peak.take(context.world))
            state = state.after(step, result.skipped)
        return found

    ranks = world.run(work)
    assert ranks == [ranks[0]] * len(ranks)
    return ranks[0]


LAYOUTS = [
    Layout(tp=2, sequence_parallel=True, shape="llama"),
    Layout(cp=2, documents=True, shape="llama", micro_batch=2),
    Layout(cp=2, comm="a2a", micro_batch=2, recompute="selective"),
]
MORE_LAYOUTS = [
    Layout(pp=2, dp=2, zero=3, schedule="zb-h1", recompute="full"),
    Layout(cp=2, comm="all_gather", attends="window", micro_batch=2),
    Layout(cp=4, comm="a2a+p2p", micro_batch=2, shape="llama"),
    Layout(tp=2, shape="t5"),
    Layout(tp=2, pp=2, shape="deepseek"),
    Layout(tp=2, shape="bert", recompute="full"),
]


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in MORE_LAYOUTS)],
    ids=lambda layout: layout.name,
)
def test_the_largest_logit_is_that_of_one_process(layout):
    assert not layout.broken_rules()
    assert peaks_of(layout) == pytest.approx(peaks_of(layout.serial), rel=1e-5)


def test_records_have_both(tmp_path):
    for flags, has in (("", False), ("--log-max-attention-logit", True)):
        path = tmp_path / f"{has}.jsonl"
        line = [*SMALL.split(), *flags.split(), "--metrics-jsonl", str(path)]
        pretrain(parse_config(line, world_size=1).config, Launch())
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            clip = 0.5 / (record["grad_norm"] + 1e-6)
            assert record["clip_factor"] == pytest.approx(min(1.0, clip))
            assert ("max_attention_logit" in record) is has
        if has:
            logits = [record["max_attention_logit"] for record in records]
            assert len(set(logits)) == 3
            assert all(0 < logit < 100 for logit in logits)


def test_compiled_layers_are_refused():
    with pytest.raises(ConfigError, match="compiled layers show nobody their logits"):
        parse_config([*SMALL.split(), "--log-max-attention-logit", "--compile"], world_size=1)
