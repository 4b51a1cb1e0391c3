"""Which parameter a skipped step names: the first of the model that is not finite, on whatever layout.

Each rank once named the first in the order of its buckets, which backward fills from the end of the model,
and the first rank that had one was believed. Two bad tensors then had one name on a layout and another on the
next.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import pytest
from torch import Tensor, nn

from megazero.config.training_plan import training_plan_of
from megazero.deepspeed.moe.copies import ExpertCopies
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.store.store import GRADIENT
from megazero.zero.unit import module_units
from tests.layouts.layout import Layout
from tests.zero.policies import make_policy

LAYOUTS = (
    Layout(layers=4),
    Layout(layers=4, tp=2, sequence_parallel=True),
    Layout(layers=4, dp=2, zero=1),
    Layout(layers=4, dp=2, zero=2, bucket_size=1),
    Layout(layers=4, dp=2, zero=3),
    Layout(layers=4, pp=2),
    Layout(layers=4, pp=2, schedule="interleaved", virtual=2),
    Layout(layers=4, pp=2, schedule="zb-v"),
    Layout(layers=4, pp=4, untied=True),
    Layout(layers=4, pp=2, tp=2, zero=3, store="cpu"),
)
BAD = (
    (("layers.2.mlp.up.weight", "layers.2.attention.qkv.weight"), "layers.2.attention.qkv.weight"),
    (("layers.3.mlp.down.weight", "layers.1.mlp.down.bias", "final_norm.weight"), "layers.1.mlp.down.bias"),
    (("layers.0.input_norm.weight", "embedding.word.weight"), "embedding.word.weight"),
    (("final_norm.bias", "layers.3.mlp_norm.weight"), "layers.3.mlp_norm.weight"),
)


def poison(optimizer: Optimizer, names: Collection[str]) -> None:
    """Let the gradient sums of these parameters be NaN when the next norm is taken."""

    def grad_squares() -> Tensor:
        buckets = [bucket for bucket in optimizer.store.buckets if bucket.key.trainable]
        for loaded_buckets in optimizer.store.stream((GRADIENT,), buckets, changes=(GRADIENT,)):
            for loaded in loaded_buckets:
                layout = loaded.bucket.layout
                for number, _, piece in layout.member_pieces(loaded.flats[GRADIENT]):
                    spec = layout.specs[number]
                    if (spec.tied_with or spec.name) in names:
                        piece.fill_(math.nan)
        del optimizer.grad_squares
        return optimizer.grad_squares()

    optimizer.grad_squares = grad_squares


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_names_the_same_one(layout):
    config, world = layout.config(), ThreadWorld(layout.world_size, 60.0)
    training_plan = training_plan_of(config, layout.dp)

    def work(rank: int) -> list[str]:
        context = thread_context(world, layout.grid, rank)
        engine = verification_engine(config, training_plan, context)
        reported = []
        for bad, _ in BAD:
            state = TrainState()
            batches = micro_batches(config, context, training_plan.at(state.progress))
            poison(engine.optimizer, bad)
            reported.append(engine.train_step(batches, state.progress, Timers()).first_bad_parameter)
        return reported

    reports = world.run(work)
    assert all(report == reports[0] for report in reports)
    assert [name.split(" (rank ")[0] for name in reports[0]] == [first for _, first in BAD]


def orders(grid: ProcessGrid) -> list[str]:
    """The names of a small model's parameters by their order, over all ranks."""
    world = ThreadWorld(grid.world_size)

    def work(rank: int) -> list[tuple[tuple[int, ...], str]]:
        model = nn.ModuleList()
        for layer in range(2):
            experts = ExpertCopies(nn.Linear(2, 2), 4)
            count = 4 // grid["ep"]
            experts.keep(rank % grid["ep"] * count, count)
            experts.name_parameters(f"{layer}.experts")
            model.append(nn.ModuleDict({"gate": nn.Linear(2, 4), "experts": experts}))
        units = module_units(model)
        store = build_store(units, make_policy(), thread_context(world, grid, rank))
        return [
            (member.order, member.spec.name) for bucket in store.buckets for member in bucket.layout.members
        ]

    found = {member for members in world.run(work) for member in members}
    return [name for _, name in sorted(found)]


def test_experts_of_other_ranks_come_in_the_order_of_their_numbers():
    wanted = [
        name
        for layer in range(2)
        for name in (
            *(f"{layer}.gate.{kind}" for kind in ("weight", "bias")),
            *(f"{layer}.experts.{number}.{kind}" for number in range(4) for kind in ("weight", "bias")),
        )
    ]
    assert orders(ProcessGrid()) == wanted
    assert orders(ProcessGrid(dp=2, ep=2)) == wanted
    assert orders(ProcessGrid(dp=4, ep=4)) == wanted
