from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megazero.config.steps import BEGINNING, BatchRamp, SequenceLengths, Steps
from megazero.data.sampler import BatchSampler, SamplerKind, SamplerSpec, batch_indices, part_permutation
from megazero.data.shuffle import cyclic_sample
from megazero.errors import DataError
from tests.tables import over_table

SINGLE, CYCLIC = SamplerKind.SINGLE, SamplerKind.CYCLIC
DATA = 29  # a prime, so that nothing fills an epoch exactly


def ranks(spec: SamplerSpec) -> list[SamplerSpec]:
    return [replace(spec, data_parallel_rank=r) for r in range(spec.data_parallel_size)]


def taken(spec: SamplerSpec, start: int, stop: int) -> list[int]:
    """What all ranks train on from `start` to `stop` consumed samples, in the training order."""
    assert (stop - start) % spec.stride == 0
    steps = range(start, stop, spec.stride)
    return [i for consumed in steps for s in ranks(spec) for i in batch_indices(s, consumed).tolist()]


def cyclic(size: int, micro: int, samples: int = DATA) -> SamplerSpec:
    return SamplerSpec(samples, micro, 0, size, CYCLIC, seed=5)


def test_single_is_sequential_slices():
    spec = SamplerSpec(num_samples=24, micro_batch_size=2, data_parallel_size=3)
    assert [batch_indices(s, 0).tolist() for s in ranks(spec)] == [[0, 1], [2, 3], [4, 5]]
    assert [batch_indices(s, 18).tolist() for s in ranks(spec)] == [[18, 19], [20, 21], [22, 23]]
    assert batch_indices(spec, 7).tolist() == [7, 8]


def test_single_past_the_end_is_an_error_and_no_quiet_stop():
    spec = SamplerSpec(num_samples=23, micro_batch_size=2, data_parallel_size=3)
    sampler = BatchSampler(spec)
    assert sampler.at(12).tolist() == [12, 13]
    with pytest.raises(DataError, match="within the 23 samples, but is 18"):
        sampler.at(18)


@over_table("size", [1, 2, 3, 4])
@over_table("micro", [1, 2, 3, 6])
def test_the_cyclic_order_does_not_depend_on_ranks_and_micro_batches(size, micro):
    """It did: micro-batches took strides of a permutation, and what filled no step of an epoch was lost."""
    assert taken(cyclic(size, micro), 0, 144) == [cyclic_sample(p, DATA, 5) for p in range(144)]


def test_a_micro_batch_may_end_one_epoch_and_begin_the_next():
    spec = cyclic(1, 4, samples=6)
    first, second = ([cyclic_sample(6 * epoch + i, 6, 5) for i in range(6)] for epoch in (0, 1))
    assert batch_indices(spec, 4).tolist() == [*first[4:], *second[:2]]
    assert batch_indices(spec, 5).tolist() == [first[5], *second[:3]]


def test_there_may_be_less_data_than_one_step_takes():
    assert Counter(taken(cyclic(4, 2, samples=3), 0, 24)) == {0: 8, 1: 8, 2: 8}


@over_table("seed", range(20))
def test_a_run_that_changes_its_ranks_and_batches_gives_each_sample_once_an_epoch(seed):
    rng, consumed, found = random.Random(seed), 0, []
    while consumed < 4 * DATA:
        spec = cyclic(rng.randint(1, 4), rng.randint(1, 3))
        stop = consumed + spec.stride * rng.randint(1, 4)
        found += taken(spec, consumed, stop)
        consumed = stop
    for epoch in range(4):
        assert sorted(found[epoch * DATA : (epoch + 1) * DATA]) == list(range(DATA))


@over_table(("size", "micro"), list(product([1, 2, 4], [1, 2])))
def test_a_batch_ramp_only_cuts_the_order_otherwise(size, micro):
    steps = Steps(BatchRamp(8, 8, 40, 24), micro * size, SequenceLengths.constant(4))
    progress, found, batches = BEGINNING, [], []
    for _ in range(9):
        step = steps.at(progress)
        for i in range(step.micro_batches):
            start = progress.samples + i * steps.unit
            found += taken(cyclic(size, micro), start, start + steps.unit)
        batches.append(step.batch_size)
        progress = step.after
    assert sorted(set(batches)) == [8, 16, 24]
    assert found == [cyclic_sample(p, DATA, 5) for p in range(sum(batches))]


@over_table(("samples", "micro", "size"), [(24, 2, 3), (7, 1, 4), (31, 3, 2), (10, 5, 1), (64, 4, 4)])
def test_a_rank_s_own_epoch_gives_no_sample_twice(samples, micro, size):
    spec = SamplerSpec(samples, micro, 0, size, CYCLIC, seed=3, data_sharding=True)
    epochs = []
    for epoch in range(3):
        seen = np.array(taken(spec, epoch * spec.samples_per_epoch, (epoch + 1) * spec.samples_per_epoch))
        assert seen.size == np.unique(seen).size == samples - samples % (micro * size)
        assert 0 <= seen.min() <= seen.max() < samples
        epochs.append(seen.tolist())
    assert epochs[0] != epochs[1] != epochs[2] or samples < 10


@over_table(("kind", "sharding"), [(SINGLE, False), (CYCLIC, False), (CYCLIC, True)])
def test_resume_continues_exactly_in_any_epoch(kind, sharding):
    """The offset within an epoch must be applied once: not again in the epochs after it (sharp edge 27)."""
    spec = SamplerSpec(200 if kind is SINGLE else 26, 2, 1, 3, kind, seed=5, data_sharding=sharding)
    sampler, steps = BatchSampler(spec), range(20)  # about five cyclic epochs
    whole = [sampler.at(step * spec.stride).tolist() for step in steps]
    for done in steps:
        resumed = BatchSampler(spec)
        assert [resumed.at(step * spec.stride).tolist() for step in steps[done:]] == whole[done:]
        assert batch_indices(spec, done * spec.stride).tolist() == whole[done]


def test_data_sharding_follows_megatron_for_seed_zero():
    """Permutations of torch's generator seeded with the epoch, the same within each rank's part."""
    import torch

    for epoch in (0, 1):
        part = torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()
        spec = SamplerSpec(25, 2, 0, 3, CYCLIC, data_sharding=True)
        assert [batch_indices(s, epoch * 24 + 6).tolist() for s in ranks(spec)] == [
            [8 * r + part[2], 8 * r + part[3]] for r in range(3)
        ]


def test_seed_and_epoch_of_a_part_do_not_collide():
    spec = SamplerSpec(1000, 1, kind=CYCLIC, data_sharding=True)
    orders = {
        (seed, epoch): tuple(part_permutation(replace(spec, seed=seed), epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9


def test_kind_may_be_its_name():
    assert SamplerSpec(8, 1, kind="cyclic").kind is CYCLIC


@over_table(
    ("change", "words"),
    [
        ({"micro_batch_size": 0}, "`micro_batch_size`"),
        ({"data_parallel_rank": 2}, "`data_parallel_rank`"),
        ({"data_parallel_rank": -1}, "`data_parallel_rank`"),
        ({"num_samples": 3}, "`num_samples` must be at least one micro-batch"),
        ({"num_samples": 3, "kind": CYCLIC, "data_sharding": True}, "must be at least one micro-batch"),
        ({"num_samples": 0, "kind": CYCLIC}, "`num_samples` must be at least 1"),
    ],
)
def test_impossible_values(change, words):
    with pytest.raises(DataError, match=words):
        SamplerSpec(**{"num_samples": 8, "micro_batch_size": 2, "data_parallel_size": 2, **change})


def test_consumed_samples_that_fit_no_micro_batch():
    with pytest.raises(DataError, match=r"multiple of micro_batch_size \* data_parallel_size \(4\)"):
        batch_indices(SamplerSpec(40, 2, 0, 2, CYCLIC, data_sharding=True), 6)
    with pytest.raises(DataError, match="at least 0"):
        batch_indices(SamplerSpec(40, 2), -1)
