"""Law 1 over ZeRO's stages: whatever is sharded, a training equals that of one process."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from megazero.mpu.context import make_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.torch_group import open_group
from megazero.zero.policy import ZeroPolicy
from megazero.zero.table import STAGES
from megazero.zero.unit import module_units
from tests.zero.harness import Record, Trainer, assert_same, in_threads, serial
from tests.zero.late_group import with_late_groups
from tests.zero.models import Sometimes, Zoo, gpt_loss, layer_units, make_gpt, sometimes_loss, zoo_loss
from tests.zero.policies import make_policy


def policy(stage: int, **changes) -> ZeroPolicy:
    """Nothing persists and nothing is kept, unless said otherwise."""
    return make_policy(stage=stage, **{"persistence_threshold": 0, "max_live": 0, "prefetch": 500, **changes})


@cache
def zoo() -> Record:
    return serial(Zoo, zoo_loss)


@cache
def gpt() -> Record:
    return serial(make_gpt, gpt_loss)


@pytest.mark.parametrize("overlap", [pytest.param(True, marks=pytest.mark.fast), False])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.fast), 4])
@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_every_kind_of_parameter(stage, size, overlap):
    cases = product((1, 300, 10**9), (1, 3)) if size == 2 else ((1, 3), (300, 1), (10**9, 3))
    for bucket_size, micro_batches in cases:
        settings = policy(stage, bucket_size=bucket_size, overlap_gather=overlap)

        def work(context, settings=settings, micro_batches=micro_batches):
            return Trainer(Zoo(), zoo_loss, settings, context, overlap=overlap).train(3, micro_batches)

        records = in_threads(size, work)
        for record in records:
            assert_same(record, zoo())


@pytest.mark.parametrize("multiple", [8, 128])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_aligned_slices(stage, size, multiple):
    """With 128, all of the zoo's state may be on the first rank, and nothing but padding on the others."""
    for bucket_size in (1, 10**9):
        settings = policy(stage, bucket_size=bucket_size)

        def work(context, settings=settings):
            trainer = Trainer(Zoo(), zoo_loss, settings, context, multiple=multiple, late=True)
            return trainer.train(3, 2)

        for record in in_threads(size, work):
            assert_same(record, zoo())


@pytest.mark.parametrize("changes", [{}, {"hpz": 2}, {"max_live": 2000}], ids=str)
def test_aligned_slices_of_a_model(changes):
    settings = policy(3, bucket_size=300, **changes)

    def train(context):
        model = make_gpt()
        return Trainer(model, gpt_loss, settings, context, layer_units(model), multiple=128).train()

    for record in in_threads(4, train, node_size=changes.get("hpz", 1)):
        assert_same(record, gpt())


def test_the_zoo_learns():
    # The law would hold for a training that moves nothing.
    first, last = zoo().weights[0], zoo().weights[-1]
    still = {name for name in first if torch.equal(first[name], last[name])}
    assert still == {"frozen.weight", "frozen.bias", "empty"}
    assert not zoo().gradients[0].keys() & {"frozen.weight", "frozen.bias"}
    assert zoo().gradients[0]["unused"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("units", "recompute", "changes"),
    [
        (module_units, "selective", {"max_live": 10**9}),
        *(
            (units, recompute, changes)
            for recompute in ("none", "full")
            for units, changes in [
                (layer_units, {"max_live": 3000, "prefetch": 0}),
                (layer_units, {"persistence_threshold": 40, "prefetch": 10**9}),
                (module_units, {"persistence_threshold": 10**9}),
                (module_units, {"bucket_size": 300, "hpz": 2}),
                (layer_units, {"max_live": 2000, "hpz": 4, "overlap_gather": False}),
            ]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_stage_3_of_gpt(units, recompute, changes):
    def work(context):
        model = make_gpt(recompute)
        return Trainer(model, gpt_loss, policy(3, **changes), context, units(model)).train(3, 3)

    hpz = changes.get("hpz", 1)
    for record in in_threads(4 if hpz > 1 else 2, work, node_size=hpz):
        assert_same(record, gpt())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_a_parameter_that_only_some_ranks_use(stage, overlap):
    # In stage 3 each rank gathers in between, so there all start their reductions after backward.
    overlap = overlap and not STAGES[stage].shard_params
    settings = policy(stage, bucket_size=1)
    expected = serial(Sometimes, sometimes_loss)

    def work(context):
        return Trainer(Sometimes(), sometimes_loss, settings, context, overlap=overlap).train(3, 2)

    for record in in_threads(3, work):
        assert_same(record, expected)


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_overlap_is_no_race(stage):
    """A collective that happens as late as it may, when it is waited for, gives the same bits.

    DeepSpeed's overlap once changed the gradient norm, for reading a buffer that was still under way.
    """
    settings = policy(stage, bucket_size=100, max_live=200)

    def work(context):
        return Trainer(Zoo(), zoo_loss, settings, context).train(3, 3)

    at_once = in_threads(2, work)
    late = in_threads(2, lambda context: work(with_late_groups(context)))
    for got, want in zip(late, at_once, strict=True):
        assert got.norms == want.norms
        for a, b in zip(got.weights, want.weights, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)


def _gloo_rank(rank: int, world_size: int, stage: int) -> Record:
    from datetime import timedelta

    launch = Launch(rank, world_size, rank)
    context = make_context(
        ProcessGrid(dp=world_size),
        launch.rank,
        torch.device("cpu"),
        lambda name, ranks: open_group(name, rank, ranks, timedelta(seconds=30)),
        node_size=2,
    )
    settings = policy(stage, bucket_size=300, max_live=100, hpz=2)
    return Trainer(Zoo(), zoo_loss, settings, context).train(3, 3)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_gloo_processes_equal_one_process(pool, stage):
    for record in pool.run(_gloo_rank, 2, stage):
        assert_same(record, zoo())
