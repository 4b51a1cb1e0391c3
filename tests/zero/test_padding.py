"""Rows that pad a vocabulary are no part of the model: nothing that is summed over it may see them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from megazero.zero.layout import counted_parts, present_parts
from megazero.zero.optimizer import Optimizer
from tests.layouts.layout import Layout

STEPS = 2
WIDTH = 32  # of a row of the vocabulary's weights
VOCABULARY = 41
PADDED = {1: 44, 2: 48, 4: 48}  # rows, a multiple of four on each tensor-parallel rank


@dataclass(frozen=True)
class Sums:
    """What a rank finds after the last step: sums over the model, and the same of gathered tensors."""

    zeros: int
    grad_norm: float
    params_norm: float
    gathered_zeros: int
    gathered_grad_norm: float
    gathered_params_norm: float
    padding: int


def config_of(layout: Layout) -> Config:
    config = layout.config()
    model = config.model.model_copy(update={"vocab_size": VOCABULARY})
    return config.model_copy(update={"model": model})


def sums_of(layout: Layout, context: ParallelContext) -> Sums:
    """Train a few steps, and sum in both ways; checks that padding has stayed zero."""
    config = config_of(layout)
    training_plan = training_plan_of(config, context.data.size)
    engine, state = verification_engine(config, training_plan, context), TrainState()
    for _ in range(STEPS):
        step = training_plan.at(state.progress)
        result = engine.train_step(micro_batches(config, context, step), state.progress, Timers())
        state = state.after(step, result.skipped)
    optimizer, zeros, squares = engine.optimizer, 0, [0.0, 0.0]
    weights = ((spec, kinds["weight"]) for spec, kinds in optimizer.full_state(("weight",)))
    for i, tensors in enumerate((optimizer.full_gradients(), weights)):
        for spec, local in tensors:
            whole = spec.unshard(local, context.groups)
            if spec.tied_with is None:
                squares[i] += float(whole.double().square().sum())
                zeros += int((whole == 0).sum()) if i == 0 else 0
    # Each stage has gathered its own parameters.
    gathered = torch.tensor([zeros, *squares], dtype=torch.float64)
    context.pp.all_reduce(gathered).wait()
    return Sums(
        optimizer.measures.count_zero_grads(),
        optimizer.grad_norm(),
        optimizer.measures.params_norm(),
        int(gathered[0]),
        math.sqrt(gathered[1]),
        math.sqrt(gathered[2]),
        padding_of(optimizer, context),
    )


def padding_of(optimizer: Optimizer, context: ParallelContext) -> int:
    """The elements of padding on one replica that norms include; they must be zero in whatever is kept."""
    found = 0.0
    kinds = ("gradient", "weight", *optimizer.rule.state_names)
    buckets = [bucket for bucket in optimizer.store.buckets if bucket.key.trainable]
    for loaded_buckets in optimizer.store.stream(kinds, buckets):
        for each in loaded_buckets:
            layout = each.bucket.layout
            padding = torch.zeros(len(each.flats["weight"]), dtype=torch.bool)
            for part in counted_parts(layout):
                padding[part] = True
            for part in present_parts(layout):
                assert padding[part].all(), "what is present counts"
                padding[part] = False
            for kind in kinds:
                assert not each.flats[kind][padding].any(), f"{kind} of {layout.specs}"
            copies = 1 if layout.row.shard_state else layout.ranks
            found += int(padding.sum()) / copies
    total = torch.tensor(found)
    context.world.all_reduce(total).wait()
    return round(total.item())


@cache
def alone(layout: Layout) -> Sums:
    return sums_of(layout, solo_context())


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(tp=tp) for tp in (1, 2, 4)),
        *(Layout(tp=t, dp=2, zero=z, sequence_parallel=t == 2) for t in (1, 2, 4) for z in range(4)),
        *(Layout(pp=2, dp=2, zero=zero) for zero in range(4)),
        Layout(pp=2, tp=2),
        Layout(pp=2, schedule="zb-v", layers=4),
    ],
    ids=lambda layout: layout.name,
)
def test_sums_over_the_model_do_not_see_padding(layout, untied):
    """Zero gradients were counted in the padding too, which only some numbers of ranks need."""
    layout = replace(layout, shape="llama", untied=untied)
    expected, world = alone(layout.serial), ThreadWorld(layout.world_size)
    found = world.run(lambda rank: sums_of(layout, thread_context(world, layout.grid, rank)))
    for seen in found:
        assert seen.zeros == seen.gathered_zeros == expected.zeros
        assert seen.padding == (2 if untied else 1) * (PADDED[layout.tp] - VOCABULARY) * WIDTH
        for name in ("grad_norm", "params_norm"):
            gathered = getattr(seen, f"gathered_{name}")
            assert getattr(seen, name) == pytest.approx(gathered, rel=1e-6)
            assert gathered == pytest.approx(getattr(expected, name), rel=1e-4)


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_what_one_process_counts(untied):
    """Of an embedding of its own, the rows of two entries, on which no loss of the step depends."""
    assert alone(Layout(shape="llama", untied=untied).serial).zeros == (2 * WIDTH if untied else 0)
