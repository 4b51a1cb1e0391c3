"""One step: pooled averages, skipped steps, loss scaling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megazero.config.training_plan import training_plan_of
from megazero.errors import DataError
from megazero.models.batch import Batch, TextCollate
from megazero.models.targets import Targets
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.optim.loss_scaler import DynamicLossScaler, ScalerState, StaticLossScaler
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout


def make(context, **layout):
    config = Layout(**layout).config()
    return verification_engine(config, training_plan_of(config, context.data.size), context)


def samples(step: int, context, **layout):
    config = Layout(**layout).config()
    training_plan = training_plan_of(config, context.data.size)
    return micro_batches(config, context, training_plan.at(training_plan.before(step)))


def the_model(engine):
    return engine.executor.chunks[0]


def masters(engine):
    store = engine.optimizer.store
    return [store.at_rest(bucket)["weight"].clone() for bucket in store.buckets]


def step(engine, batches):
    return engine.train_step(batches, TrainState().progress, Timers())


def test_loss_and_gradient_are_means_over_counted_positions():
    context = solo_context()
    engine = make(context)
    batches = samples(0, context)
    weights = [b.counts["lm"] for b in batches]
    assert max(weights) > 2 * min(weights), "the masks are meant to be uneven"
    expected = sum(the_model(engine).run(b).terms["lm"] for b in batches) / sum(weights)
    params = list(the_model(engine).parameters())
    wanted = torch.autograd.grad(expected, params)
    result = step(engine, batches)
    assert result.losses["lm"] == result.losses.total == pytest.approx(expected.item(), rel=1e-6)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in wanted))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def nothing_counted(batches):
    return [replace(b, targets=Targets(b.learnt.labels, torch.zeros(b.tokens.shape), 0.0)) for b in batches]


def everything(engine):
    """All that a step may change."""
    optimizer = engine.optimizer
    whole = {s.name: {kind: t.clone() for kind, t in kinds.items()} for s, kinds in optimizer.full_state()}
    return whole, optimizer.updates, engine.scaler_state


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_batch_without_any_counted_position_changes_nothing(zero, dp, dtype):
    # Once it decayed weights and moments.
    world, grid = ThreadWorld(dp), ProcessGrid(dp=dp)

    def prepared(context):
        engine = make(context, dp=dp, zero=zero, dtype=dtype)
        if dtype == "fp16":
            # One good step more would double the scale, one overflow halve it.
            engine.scaler = DynamicLossScaler(initial_scale=4.0, window=2, hysteresis=1)
            engine.scaler_state = engine.scaler.initial()
        return engine

    def work(rank):
        context = thread_context(world, grid, rank)
        engine = prepared(context)
        first = step(engine, samples(0, context, dp=dp))
        before = everything(engine)
        result = step(engine, nothing_counted(samples(1, context, dp=dp)))
        after = everything(engine)
        assert before[1:] == after[1:]
        assert before[1] == 1
        for name, kinds in before[0].items():
            assert {"weight", "exp_avg", "exp_avg_sq"} <= kinds.keys()
            assert all(torch.equal(kinds[kind], after[0][name][kind]) for kind in kinds), name
        again = step(engine, samples(1, context, dp=dp))
        return first, result, again, everything(engine)

    def work_without(rank):
        context = thread_context(world, grid, rank)
        engine = prepared(context)
        step(engine, samples(0, context, dp=dp))
        return step(engine, samples(1, context, dp=dp)), everything(engine)

    for (first, result, again, after), (wanted, end) in zip(
        world.run(work), world.run(work_without), strict=True
    ):
        # The next step is as if there had been no such batch.
        assert (again, after[1:]) == (wanted, end[1:])
        assert again.skipped is False
        assert all(
            torch.equal(t, after[0][name][k]) for name, kinds in end[0].items() for k, t in kinds.items()
        )
        assert (result.losses.total, result.grad_norm, result.skipped) == (None, 0.0, True)
        assert result.losses.labelled() == {"lm loss": None}
        assert (result.learning_rate, result.first_bad_parameter) == (first.learning_rate, None)


@pytest.mark.parametrize("pp", [1, 2])
def test_one_counted_position_on_a_rank_weighs_as_much_as_each_of_seven_on_another(pp):
    # A mean of the ranks' means would weigh it seven times as much.
    world, grid = ThreadWorld(2 * pp), ProcessGrid(dp=2, pp=pp)

    def masked(rank, batches, counts):
        masks = []
        for batch, count in zip(batches, counts, strict=True):
            mask = torch.zeros(batch.tokens.shape)
            mask.view(-1)[3 * rank : 3 * rank + count] = 1.0
            masks.append(replace(batch, targets=Targets(batch.learnt.labels, mask, float(count))))
        return masks

    def train(engine, batches):
        result = step(engine, batches)
        return result, {spec.name: grad.clone() for spec, grad in engine.optimizer.full_gradients()}

    def work(rank):
        context = thread_context(world, grid, rank)
        engine = make(context, dp=2, pp=pp, micro_batch=4)
        (batch,) = samples(0, context, dp=2, micro_batch=4)
        return train(engine, masked(context.data.rank, [batch], [(1, 7)[context.data.rank]]))

    context = solo_context()
    halves = masked(0, samples(0, context, micro_batch=4)[:1], [1])
    halves += masked(1, samples(0, context, micro_batch=4)[1:], [7])
    wanted, gradients = train(make(context, micro_batch=4), halves)
    model = the_model(make(context, micro_batch=4))
    pooled = sum(model.run(half).terms["lm"].item() for half in halves) / 8
    assert wanted.losses["lm"] == pytest.approx(pooled, rel=1e-6)
    found = {}
    for result, mine in world.run(work):
        assert result.losses["lm"] == pytest.approx(wanted.losses["lm"], rel=1e-6)
        assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
        found |= mine
    assert found.keys() >= gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def poison(engine, name: str) -> None:
    """Make the gradient of one parameter infinite from now on."""
    for bucket in engine.optimizer.store.buckets:
        for spec, param in zip(bucket.layout.specs, bucket.params, strict=True):
            if spec.name == name:
                param.register_hook(lambda grad: grad * math.inf)


@pytest.mark.parametrize("bad_rank", [0, 1, 3])
def test_one_rank_with_inf_makes_all_ranks_skip_and_names_the_parameter(bad_rank):
    world, grid = ThreadWorld(4), ProcessGrid(dp=2, tp=2)
    name = "layers.1.mlp.up.weight"

    def work(rank):
        context = thread_context(world, grid, rank)
        engine = make(context, tp=2, dp=2)
        before = masters(engine)
        if rank == bad_rank:
            poison(engine, name)
        result = step(engine, samples(0, context))
        same = all(torch.equal(a, b) for a, b in zip(before, masters(engine), strict=True))
        return result.skipped, result.first_bad_parameter, same, engine.optimizer.updates

    for skipped, bad, same, updates in world.run(work):
        assert (skipped, same, updates) == (True, True, 0)
        assert bad.startswith(name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_static_scale_gives_the_same_step(dtype):
    context = solo_context()
    runs = []
    for scale in (1.0, 4096.0):
        engine = make(context, dtype=dtype)
        engine.scaler, engine.scaler_state = StaticLossScaler(scale), ScalerState(scale)
        result = step(engine, samples(0, context))
        runs.append((result, masters(engine)))
    assert runs[0][0].grad_norm == runs[1][0].grad_norm
    assert runs[1][0].loss_scale == 4096.0
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_dynamic_scale_falls_until_fp16_steps_succeed():
    context = solo_context()
    engine = make(context, dtype="fp16")
    engine.scaler = DynamicLossScaler(initial_scale=2.0**32, min_scale=1.0, window=1000, hysteresis=1)
    engine.scaler_state = engine.scaler.initial()
    results = [step(engine, samples(0, context)) for _ in range(40)]
    assert results[0].skipped
    first = next(i for i, r in enumerate(results) if not r.skipped)
    assert results[first].loss_scale == 2.0 ** (32 - first)
    assert engine.optimizer.updates == sum(not r.skipped for r in results)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_follows_fp32(dtype):
    context = solo_context()
    losses = {}
    for kind in ("fp32", dtype):
        engine = make(context, dtype=kind)
        if kind == "fp16":
            engine.scaler, engine.scaler_state = StaticLossScaler(256.0), ScalerState(256.0)
        losses[kind] = [step(engine, samples(i, context)).losses["lm"] for i in range(5)]
    np.testing.assert_allclose(losses[dtype], losses["fp32"], rtol=2e-2)
    assert masters(engine)[0].dtype == torch.float32


def test_evaluation_changes_nothing_and_drops_nothing():
    context = solo_context()
    engine = make(context, dropout=0.5)
    before = masters(engine)
    plain = [replace(b, places=replace(b.places, sample_keys=None)) for b in samples(0, context)]
    first, tokens, _ = engine.evaluate([plain])
    assert engine.evaluate([plain])[:2] == (first, tokens)
    masked = sum(int(b.learnt.weights.sum()) for b in plain if b.learnt.weights is not None)
    assert tokens == masked + SEQUENCE * sum(b.learnt.weights is None for b in plain)
    assert list(first.labelled()) == ["lm loss"]
    assert all(torch.equal(a, b) for a, b in zip(before, masters(engine), strict=True))


def test_a_foreign_token_of_a_batch_made_by_hand_is_refused():
    engine = make(solo_context())
    bad = Batch(torch.full((1, SEQUENCE), VOCABULARY), Targets(torch.zeros(1, SEQUENCE, dtype=torch.long)))
    with pytest.raises(DataError, match=rf"must lie in \[0, {VOCABULARY}\), but {SEQUENCE} do not"):
        step(engine, [bad])


def test_a_foreign_label_of_a_batch_made_by_hand_trains_nothing():
    """Those made of arrays are looked at (tests/models/test_gpt.py)."""
    engine = make(solo_context())
    before = masters(engine)
    labels = torch.zeros(1, SEQUENCE, dtype=torch.long)
    labels[0, 3] = VOCABULARY
    result = step(engine, [Batch(torch.zeros_like(labels), Targets(labels))])
    assert result.skipped
    assert np.isnan(result.losses["lm"])
    assert all(torch.equal(a, b) for a, b in zip(before, masters(engine), strict=True))


@pytest.mark.parametrize("name", ["tokens", "labels"])
def test_what_a_dataset_gives_is_looked_at(name):
    """Whatever the dataset: one of another tokenizer, or of a user's own making."""
    arrays = {key: np.zeros((1, SEQUENCE), dtype=np.int64) for key in ("tokens", "labels")}
    arrays[name][0, 5] = VOCABULARY
    collate = TextCollate(VOCABULARY, torch.device("cpu"), seed=1)
    with pytest.raises(DataError, match=rf"`{name}` must be in \[0, {VOCABULARY}\), but is {VOCABULARY} at"):
        collate(arrays, (0,))
