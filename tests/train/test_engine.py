"""One step: pooled averages, skipped steps, loss scaling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megazero.models import Batch
from megazero.mpu import ProcessGrid, ThreadWorld, solo_context, thread_context
from megazero.optim import DynamicLossScaler, ScalerState, StaticLossScaler
from megazero.train.state import TrainState
from megazero.train.timers import Timers
from megazero.verify.layouts import GLOBAL_BATCH, SEQUENCE, VOCABULARY, Layout
from megazero.verify.record import micro_batches, verification_engine

TOKENS = GLOBAL_BATCH * SEQUENCE


def make(context, **layout):
    return verification_engine(Layout(**layout).config(), context)


def samples(step: int, context, **layout):
    return micro_batches(Layout(**layout).config(), context, step)


def the_model(engine):
    return engine.executor.chunks[0]


def masters(engine):
    return [bucket.master.clone() for bucket in engine.optimizer.buckets]


def step(engine, batches):
    return engine.train_step(batches, TOKENS, TrainState().progress, Timers())


def test_loss_and_gradient_are_means_over_counted_positions():
    context = solo_context()
    engine = make(context)
    batches = samples(0, context)
    weights = [b.loss_mask.sum() for b in batches]
    assert max(weights) > 2 * min(weights), "the masks are meant to be uneven"
    expected = sum(the_model(engine).loss(b)[0] for b in batches) / sum(weights)
    params = list(the_model(engine).parameters())
    wanted = torch.autograd.grad(expected, params)
    result = step(engine, batches)
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in wanted))
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_batch_without_any_counted_position_changes_nothing_but_decay():
    context = solo_context()
    engine = make(context)
    batches = [replace(b, loss_mask=torch.zeros_like(b.loss_mask)) for b in samples(0, context)]
    result = step(engine, batches)
    assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, False)


def poison(engine, name: str) -> None:
    """Make the gradient of one parameter infinite from now on."""
    for bucket in engine.optimizer.buckets:
        for spec, param in zip(bucket.specs, bucket.params, strict=True):
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


def test_static_scale_gives_the_same_step():
    context = solo_context()
    runs = []
    for scale in (1.0, 4096.0):
        engine = make(context)
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
        losses[kind] = [step(engine, samples(i, context)).loss for i in range(5)]
    np.testing.assert_allclose(losses[dtype], losses["fp32"], rtol=2e-2)
    assert masters(engine)[0].dtype == torch.float32


def test_evaluation_changes_nothing_and_drops_nothing():
    context = solo_context()
    engine = make(context, dropout=0.5)
    before = masters(engine)
    plain = [replace(b, streams=None) for b in samples(0, context)]
    first, tokens = engine.evaluate([plain])
    assert engine.evaluate([plain]) == (first, tokens)
    assert tokens == sum(int(b.loss_mask.sum()) for b in plain)
    assert all(torch.equal(a, b) for a, b in zip(before, masters(engine), strict=True))


def test_tokens_outside_the_vocabulary_are_refused():
    from megazero.errors import DataError

    engine = make(solo_context())
    bad = Batch(torch.full((1, SEQUENCE), VOCABULARY), torch.zeros(1, SEQUENCE, dtype=torch.long))
    with pytest.raises(DataError, match=rf"must lie in \[0, {VOCABULARY}\), but range from {VOCABULARY}"):
        step(engine, [bad])
