"""Law 1 over tensor and data parallelism: same loss, gradient norm, gradients and weights as one process."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from megazero.mpu import Launch, ProcessGrid
from megazero.mpu.context import make_context
from megazero.mpu.torch_group import open_group
from tests.equivalence.harness import Case, Record, assert_same, train, train_in_threads, train_serial

CASES = [
    Case(
        tp=tp,
        dp=dp,
        sequence_parallel=sp,
        shape=shape,
        untied=untied,
        recompute=recompute,
        # With and without accumulation over micro-batches on each layout.
        micro_batch=1 if recompute == "none" else 2,
    )
    for shape, tp, dp, sp, untied, recompute in product(
        ("gpt2", "llama"), (1, 2, 4), (1, 2), (False, True), (False, True), ("none", "full", "selective")
    )
]


@cache
def serial(case: Case) -> Record:
    return train_serial(case)


def check(case: Case) -> None:
    for record in train_in_threads(case):
        assert_same(record, serial(case.serial))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_equals_one_process(case):
    check(case)


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize(("tp", "dp", "sp"), [(1, 1, False), (2, 2, False), (2, 1, True), (4, 2, True)])
def test_dropout_is_the_same_on_every_layout(tp, dp, sp, recompute, shape):
    case = Case(
        tp=tp, dp=dp, sequence_parallel=sp, shape=shape, recompute=recompute, dropout=0.2, micro_batch=2
    )
    check(case)


def test_dropout_does_something():
    assert serial(Case(dropout=0.2)).losses[0] != serial(Case()).losses[0]


def test_a_model_that_learns():
    # The law would hold for a training that moves nothing; this one moves.
    record = serial(Case())
    first, last = record.weights[0], record.weights[-1]
    assert all(not torch.equal(first[name], last[name]) for name in first)
    assert all(norm > 0.5 for norm in record.grad_norms), "clipping is not active"


@pytest.mark.parametrize("bucket_size", [1, 10**9])
def test_overlap_and_bucket_sizes_change_nothing(bucket_size):
    # Bitwise: the same sums in the same order, whenever they are started.
    runs = [
        train_in_threads(Case(tp=2, dp=2, overlap=overlap, bucket_size=size))[0]
        for overlap, size in [(False, 3000), (True, 3000), (True, bucket_size)]
    ]
    for run in runs[1:]:
        for got, want in zip(run.weights, runs[0].weights, strict=True):
            for name in want:
                # Clipping's sum of squares is over buckets, so only its last digits may differ.
                torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-7)


def _gloo_rank(rank: int, world_size: int, case: Case) -> Record:
    from datetime import timedelta

    grid = ProcessGrid(dp=case.dp, tp=case.tp)
    launch = Launch(rank, world_size, rank)
    context = make_context(
        grid,
        launch.rank,
        torch.device("cpu"),
        lambda name, ranks: open_group(name, rank, ranks, timedelta(seconds=30)),
    )
    return train(case, context)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "case",
    [
        Case(tp=1, dp=2),
        Case(tp=2, dp=1, sequence_parallel=True, shape="llama", untied=True),
        Case(tp=2, dp=2, sequence_parallel=True, recompute="full", dropout=0.1),
        Case(tp=4, dp=1, shape="llama", recompute="selective"),
    ],
    ids=lambda case: case.name,
)
def test_gloo_processes_equal_one_process(pool, case):
    for record in pool.run(_gloo_rank, case.tp * case.dp, case):
        assert_same(record, serial(case.serial))
