"""A training step reads the losses and the gradient norm from the device once, and waits for nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from megazero.config.training_plan import training_plan_of
from megazero.host_memory import sent_to
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.host_waits import HostWaits
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops import grouped_linear
from megazero.ops.dispatch import CUDA, Operator, where
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.layouts.layout import Layout
from tests.tables import over_table

PLANTED = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "if": lambda x: 1 if x.sum() else 0,
    "int": lambda x: int(x[0]),
    "range": lambda x: range(x[0].long()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to a device": lambda x: x.to(device=x.device),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "index by a mask": lambda x: x[x > 0],
    "write by a mask": lambda x: x.clone().__setitem__(x > 0, torch.ones(2)),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "tensor": lambda x: torch.tensor([1.0]),
    "tensor of a number": lambda x: torch.tensor(1.0),
    "as_tensor": lambda x: torch.as_tensor([1.0]),
    "from_numpy": lambda x: torch.from_numpy(np.ones(2)),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "memory that is not locked": lambda x: torch.empty(1 << 15).to(x.device, non_blocking=True),
}
HARMLESS = {
    "where of three": lambda x: torch.where(x > 0, x, 0.0),
    "full": lambda x: torch.full((2,), 3.0),
    "arange": lambda x: torch.arange(5),
    "to a dtype": lambda x: x.to(torch.float64),
    "to without waiting": lambda x: x.to("cpu", non_blocking=True),
    "to by way of locked memory": lambda x: sent_to(x.device, torch.empty(1 << 15)),
    "index by a range": lambda x: x[torch.arange(2)],
    "shape": lambda x: x.shape[0] * x.numel(),
    "scalars": lambda x: (x * 2 + 1).clamp_(min=0).masked_fill_(x > 0, 3.0),
}


@over_table("call", PLANTED.values(), ids=PLANTED.keys())
@over_table("backward", [False, True], ids=["forward", "backward"])
def test_a_wait_is_seen(call, backward):
    """Also where autograd calls."""
    x = torch.arange(3.0)

    def hook(grad: torch.Tensor) -> None:
        call(x)

    with HostWaits() as waits:
        if backward:
            leaf = torch.ones(2, requires_grad=True)
            leaf.register_hook(hook)
            leaf.sum().backward()
        else:
            call(x)
    assert sum(waits.found.values()) >= 1


@over_table("call", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_stays_on_the_device_is_not_counted(call):
    with HostWaits() as waits:
        call(torch.arange(3.0))
    assert not waits.found


# All that a step does to the host, once each, however many micro-batches and layers there are.
ALLOWED = Counter(
    {
        ("train/step/losses.py:local_counts", "copies host data"): 1,  # without waiting, as is the next
        ("train/step/losses.py:loss_factors", "copies host data"): 1,
        ("train/step/losses.py:_values", "reads numbers"): 1,  # with the norm, which decides about the step
    }
)
# Looks again in fp64 where fp32 overflows; takes another way on a GPU.
CPU_ONLY = "ops/square_sum.py:_in_blocks"


def waits_of_a_step(context, **layout) -> Counter:
    """Of the second step, with dropout, masks and clipping."""
    config = Layout(dropout=0.1, **layout).config()
    assert config.optimizer.clip_grad > 0
    training_plan = training_plan_of(config, context.data.size)
    engine = verification_engine(config, training_plan, context)
    for number in (0, 1):
        progress = training_plan.before(number)
        batches = micro_batches(config, context, training_plan.at(progress))
        with HostWaits() as waits:
            result = engine.train_step(batches, progress, Timers())
        assert not result.skipped
    return Counter({key: n for key, n in waits.found.items() if key[0] != CPU_ONLY})


@pytest.fixture(params=["cpu", "cuda"])
def operators_of(request, monkeypatch):
    """Operators take the implementations that they have for this device, all of which run on the CPU too."""
    choose, device = Operator.choose, request.param
    monkeypatch.setattr(Operator, "choose", lambda self, facts: choose(self, replace(facts, device=device)))
    return device


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"shape": "llama", "recompute": "selective", "zero": 1},
        {"recompute": "full", "zero": 2, "dtype": "bf16", "micro_batch": 2},
        {"shape": "llama", "zero": 3},
    ],
    ids=str,
)
def test_a_step_waits_for_the_losses_and_the_norm_alone(operators_of, layout):
    """Cross-entropy once asked for the range of its targets and every dropout copied its keys."""
    assert waits_of_a_step(solo_context(), **layout) == ALLOWED


@pytest.fixture
def kernel_for_groups(monkeypatch):
    """A GPU whose torch multiplies all groups of rows in one kernel."""
    serves = where(CUDA, frozenset({torch.bfloat16}), aligned=True)
    for name in ("GROUPED_LINEAR", "GROUPED_OUTER"):
        table = getattr(grouped_linear, name)
        rows = [replace(row, serves=serves) if row.name == "torch" else row for row in table.implementations]
        monkeypatch.setattr(grouped_linear, name, replace(table, implementations=tuple(rows)))


@pytest.mark.parametrize("experts", ["top2", "first-come", "random", "shared"])
def test_nor_do_experts_where_products_take_sizes_from_the_device(kernel_for_groups, operators_of, experts):
    """Each layer once waited for its sizes, and copied their ends to the device six times."""
    found = waits_of_a_step(solo_context(), experts=experts, dtype="bf16", samples=4)
    if operators_of == "cpu" and experts != "random":  # which fills up to the capacity
        sizes = found.pop(("moe/dispatch.py:_on_host", "reads numbers"))
        assert sizes == 2 * 4, "of each layer and micro-batch, by the loop over experts"
    assert found == ALLOWED


@pytest.mark.parametrize("layout", [{}, {"zero": 3, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_nor_do_8_bit_products(operators_of, recipe, layout):
    assert waits_of_a_step(solo_context(), fp8=recipe, samples=4, **layout) == ALLOWED


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero": 3},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "schedule": "zb-h1", "dp": 2, "zero": 2},
    ],
    ids=str,
)
def test_nor_does_a_rank_of_several(layout):
    """What the group of threads does to hand tensors over is not counted as the step's."""
    grid = ProcessGrid(**{axis: layout.get(axis, 1) for axis in ("pp", "dp", "tp")})
    world = ThreadWorld(grid.world_size)

    def work(rank: int) -> Counter:
        return waits_of_a_step(thread_context(world, grid, rank), **layout)

    for found in world.run(work):
        assert Counter({key: n for key, n in found.items() if not key[0].startswith("mpu/")}) == ALLOWED


def test_a_batch_made_of_arrays_goes_to_the_device_without_waiting():
    config = Layout(dropout=0.1).config()
    training_plan = training_plan_of(config, 1)
    with HostWaits() as waits:
        micro_batches(config, solo_context(), training_plan.at(training_plan.before(0)))
    assert {what for _, what in waits.found} == {"copies host data"}
    assert {where.split(":")[0] for where, _ in waits.found} == {"models/batch.py"}
