"""What routers remember from step to step: by hand, over ranks, and in an engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from megazero.config.training_plan import training_plan_of
from megazero.layers.placement import Placement
from megazero.moe.loads import RouterLoads
from megazero.moe.router import Router, router_weight
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec, router_spec
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.layouts.layout import GLOBAL_BATCH, SEQUENCE, Layout
from tests.moe.samples import config, on_ranks

BIASED = config(
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25
)


def routers(context, layers: int = 2) -> list[Router]:
    placement = Placement.of(context, torch.float32)
    stream = model_spec(BIASED).stream
    weights = [router_weight(layer, 4, stream, placement) for layer in range(layers)]
    return [Router(layer, weight, router_spec(BIASED)) for layer, weight in enumerate(weights)]


def tallies(*counts: list[float]) -> dict[str, Tensor]:
    return {
        f"layers.{layer}.mlp.router.tokens": torch.tensor(each, dtype=torch.float32)
        for layer, each in enumerate(counts)
    }


def test_biases_move_towards_equal_loads():
    own = routers(solo_context())
    loads = RouterLoads(own, solo_context(), experts=True)
    assert [each.load.tolist() for each in own] == [[0.25] * 4] * 2
    assert [each.bias.tolist() for each in own] == [[0.0] * 4] * 2
    told = loads.update(tallies([4, 0, 2, 2], [0, 0, 0, 8]))
    assert own[0].load.tolist() == [0.5, 0, 0.25, 0.25]
    assert own[0].bias.tolist() == [-0.25, 0.25, 0, 0]
    assert own[1].load.tolist() == [0, 0, 0, 1]
    assert own[1].bias.tolist() == [0.25, 0.25, 0.25, -0.25]
    assert {name: each.tolist() for name, each in told.items()} == {
        "layers.0.mlp.router.tokens": [4, 0, 2, 2],
        "layers.1.mlp.router.tokens": [0, 0, 0, 8],
    }
    loads.update(tallies([1, 1, 0, 6], [3, 3, 3, 3]))
    assert own[0].bias.tolist() == [0, 0.5, 0.25, -0.25], "by the last step's loads alone"
    assert own[1].bias.tolist() == [0.25, 0.25, 0.25, -0.25], "even loads move nothing"
    loads.update(tallies([0, 0, 0, 0], [0, 0, 0, 0]))
    assert own[0].load.tolist() == [0] * 4, "a step without a token"
    assert own[0].bias.tolist() == [0, 0.5, 0.25, -0.25]
    assert loads.state().keys() == {
        f"layers.{layer}.mlp.router.{what}" for layer in (0, 1) for what in ("load", "bias")
    }


def test_without_a_bias_there_are_loads_alone():
    weight = router_weight(1, 4, model_spec(config()).stream, Placement.of(solo_context(), torch.float32))
    plain = [Router(1, weight, router_spec(config()))]
    loads = RouterLoads(plain, solo_context(), experts=True)
    loads.update({"layers.1.mlp.router.tokens": torch.tensor([3.0, 1, 0, 0])})
    assert plain[0].bias is None
    assert {name: each.tolist() for name, each in loads.state().items()} == {
        "layers.1.mlp.router.load": [0.75, 0.25, 0, 0]
    }
    assert RouterLoads([], solo_context(), experts=True).update({}) == {}


@pytest.mark.parametrize("sizes", [{"tp": 1}, {"tp": 2}, {"tp": 4}, {"pp": 2}], ids=str)
def test_counts_are_of_all_ranks_of_a_stage(sizes):
    """Rank r counts r for the first expert and 1 for the third, on every stage for itself."""

    def work(context):
        own = routers(context, 1)
        loads = RouterLoads(own, context, experts=True)
        loads.update(tallies([float(context.place.rank), 0, 1, 0]))
        return own[0].load.tolist(), own[0].bias.tolist()

    found = on_ranks(work, 4, **sizes)
    for (load, bias), first in zip(found, ([1, 1, 5, 5] if "pp" in sizes else [6] * 4), strict=True):
        third = 2 if "pp" in sizes else 4
        assert load == pytest.approx([first / (first + third), 0, third / (first + third), 0])
        mean = (first + third) / 4
        assert bias == [
            0.25 if count < mean else -0.25 if count > mean else 0 for count in (first, 0, third, 0)
        ]


def trained(layout: Layout, *, evaluating: bool = False) -> list[tuple]:
    """On each rank, the tallies of each of three steps and the state after it."""
    world = ThreadWorld(layout.world_size, 60.0)

    def work(rank: int):
        context, config = thread_context(world, layout.grid, rank), layout.config(3)
        training_plan = training_plan_of(config, context.data.size)
        engine, state, found = verification_engine(config, training_plan, context), TrainState(), []
        for _ in range(3):
            step = training_plan.at(state.progress)
            batches = micro_batches(config, context, step)
            if evaluating:
                before = {name: each.clone() for name, each in engine.loads.state().items()}
                engine.evaluate([batches, batches])
                assert all(torch.equal(each, before[name]) for name, each in engine.loads.state().items())
            result = engine.train_step(batches, state.progress, Timers())
            state = state.after(step, result.skipped)
            after = {name: each.clone() for name, each in engine.loads.state().items()}
            found.append((result.tokens, after))
        return found

    return world.run(work)


ALONE = Layout(experts="biased")


@cache
def alone() -> list[tuple]:
    """Of a single process that neither recomputes nor evaluates."""
    return trained(ALONE)[0]


@pytest.mark.parametrize(
    ("layout", "evaluating"),
    [
        (replace(ALONE, recompute="full"), False),
        (ALONE, True),
        (replace(ALONE, tp=2, sequence_parallel=True, recompute="full", micro_batch=2), True),
        (replace(ALONE, dp=2, ep=2, zero=3, recompute="full"), False),
        (replace(ALONE, pp=2, schedule="1f1b", recompute="full"), True),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "evaluating" * value,
)
def test_recompute_and_evaluation_do_not_count(layout, evaluating):
    """Each token chooses two of eight experts once a step; the bias follows from those counts."""
    expected = alone()
    ranks = trained(layout, evaluating=evaluating)
    for number, (tokens, state) in enumerate(expected):
        merged_tokens, merged = {}, {}
        for rank in ranks:
            merged_tokens |= rank[number][0]
            merged |= rank[number][1]
        assert merged_tokens.keys() == tokens.keys()
        assert all(torch.equal(merged_tokens[name], each) for name, each in tokens.items())
        assert merged.keys() == state.keys()
        assert all(torch.equal(merged[name], each) for name, each in state.items())
    bias = torch.zeros(8)
    for tokens, state in expected:
        counts = tokens["layers.0.mlp.router.tokens"]
        assert counts.sum() == GLOBAL_BATCH * SEQUENCE * 2
        bias += 0.02 * (GLOBAL_BATCH * SEQUENCE * 2 / 8 - counts).sign()
        assert torch.allclose(state["layers.0.mlp.router.bias"], bias)
        assert torch.allclose(state["layers.0.mlp.router.load"], counts / counts.sum())
