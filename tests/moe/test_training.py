"""Experts in whole trainings, where a sum over the wrong ranks, or none, would go unseen in the loss."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from megazero.config.training_plan import training_plan_of
from megazero.moe.router import Router
from megazero.mpu.context import solo_context
from megazero.verify.compare import compare
from megazero.verify.record import Record, verification_engine
from megazero.verify.run import run_alone, run_in_threads
from tests.layouts.layout import Layout

TOP2 = Layout(experts="top2", micro_batch=2, untied=True)


@cache
def first_gradients(layout: Layout, coefficients: tuple[float, float]) -> dict[str, Tensor]:
    """The gradients of the first step, with these weights of the balance loss and of the z-loss."""
    config = layout.config()
    balance, z = coefficients
    model = config.model.model_copy(update={"moe_aux_loss_coeff": (balance,), "moe_z_loss_coeff": z})
    optimizer = config.optimizer.model_copy(update={"clip_grad": 0.0})  # a norm would mix all of them
    config = config.model_copy(update={"model": model, "optimizer": optimizer})
    if layout.world_size == 1:
        return run_alone(config, 1).gradients[0]
    found = {}
    for record in run_in_threads(config, layout.grid, 1):
        found |= record.gradients[0]
    return found


@pytest.mark.parametrize(
    "layout",
    [
        replace(TOP2, pp=2),
        replace(TOP2, pp=2, schedule="zb-h1", dp=2, ep=2),
        replace(TOP2, tp=2, sequence_parallel=True),
        replace(TOP2, tp=2, ep=2, etp=1),
        replace(TOP2, micro_batch=8),
    ],
    ids=lambda layout: layout.name,
)
def test_the_routers_own_losses_have_the_same_gradient_everywhere(layout):
    """What they alone add to every gradient, in a batch of which most positions do not count for the loss."""
    strong, none = (0.8, 0.3), (0.0, 0.0)

    def added(at: Layout) -> dict[str, Tensor]:
        with_terms, without = first_gradients(at, strong), first_gradients(at, none)
        return {name: each - without[name] for name, each in with_terms.items()}

    expected, found = added(TOP2), added(layout)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.allclose(found[name], each, atol=2e-6, rtol=1e-4), name
    for number in (0, 1):
        assert expected[f"layers.{number}.mlp.router.weight"].abs().max() > 1e-3
    assert expected["layers.1.mlp.experts.up.weight"].abs().max() < 1e-6, (
        "they go past the experts of the last"
    )
    assert expected["layers.0.mlp.experts.up.weight"].abs().max() > 1e-5, "but not past those before it"


@pytest.mark.parametrize("experts", ["shared", "residual"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "SP"])
def test_what_tensor_parallel_ranks_hold_alike_stays_equal_in_every_bit(experts, sequence_parallel):
    """Each rank routes other tokens, so gradients that nobody summed would drive these weights apart."""
    layout = Layout(experts=experts, tp=2, ep=2, etp=1, sequence_parallel=sequence_parallel, micro_batch=2)
    records = run_in_threads(layout.config(), layout.grid)
    alike = [
        name
        for name in records[0].weights[-1]
        if name.endswith(("router.weight", "shared_gate.weight", "coefficient.weight", "coefficient.bias"))
    ]
    assert len(alike) >= 3
    for name in alike:
        first, second = (record.weights[-1][name] for record in records)
        assert torch.equal(first, second), name
        assert not torch.equal(first, records[0].weights[0][name])


def idle(monkeypatch) -> None:
    """Let routers send every token to experts 1 and 0, whatever they score."""

    def choose(self, ranking: Tensor, noise: object) -> Tensor:
        return torch.tensor([[1, 0]]).expand(len(ranking), 2)

    monkeypatch.setattr(Router, "_choose", choose)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_that_get_nothing_have_gradients_of_zeros_and_hold_nobody_up(zero, monkeypatch):
    """With two ranks for four experts, a whole rank has no rows: it takes part in every reduction."""
    idle(monkeypatch)
    dispatcher = "allgather" if zero % 2 else "alltoall"
    layout = Layout(experts="top2", dp=2, ep=2, zero=zero, micro_batch=2, dispatcher=dispatcher)
    alone: Record = run_alone(layout.serial.config(), 2)
    records = run_in_threads(layout.config(), layout.grid, 2)
    bad = [str(each) for each in compare(records, alone) if each.share > 1]
    assert not bad, "\n".join(bad)
    for record in (alone, *records):
        for gradients in record.gradients:
            for which in ("up.weight", "down.weight", "up.bias", "down.bias"):
                grad = gradients[f"layers.1.mlp.experts.{which}"]
                assert grad[2:].abs().max() == 0, which
                assert grad[:2].abs().max() > 0, which


def test_routers_have_a_master_in_fp32():
    """A gate in half precision would lose the small steps of its training."""
    layout = Layout(experts="biased", dtype="bf16")
    config, context = layout.config(), solo_context()
    engine = verification_engine(config, training_plan_of(config, 1), context)
    states = {spec.name: kinds for spec, kinds in engine.optimizer.full_state()}
    assert states["layers.0.mlp.router.weight"]["weight"].dtype == torch.float32
    assert {each.dtype for each in engine.loads.state().values()} == {torch.float32}
