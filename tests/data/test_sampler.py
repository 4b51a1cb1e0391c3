from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from megazero.data import BatchSampler, SamplerKind, SamplerSpec, batch_indices, epoch_permutation
from megazero.errors import DataError

SINGLE, CYCLIC = SamplerKind.SINGLE, SamplerKind.CYCLIC


def ranks(spec: SamplerSpec) -> list[SamplerSpec]:
    return [replace(spec, data_parallel_rank=r) for r in range(spec.data_parallel_size)]


def test_single_is_sequential_slices():
    spec = SamplerSpec(num_samples=24, micro_batch_size=2, data_parallel_size=3)
    assert [batch_indices(s, 0).tolist() for s in ranks(spec)] == [[0, 1], [2, 3], [4, 5]]
    assert [batch_indices(s, 18).tolist() for s in ranks(spec)] == [[18, 19], [20, 21], [22, 23]]
    assert batch_indices(spec, 7).tolist() == [7, 8]


def test_single_past_the_end_is_an_error_and_no_quiet_stop():
    spec = SamplerSpec(num_samples=23, micro_batch_size=2, data_parallel_size=3)
    sampler = BatchSampler(spec, consumed_samples=12)
    assert next(sampler).tolist() == [12, 13]
    with pytest.raises(DataError, match="within the 23 samples, but is 18"):
        next(sampler)


@pytest.mark.parametrize("sharding", [False, True])
@pytest.mark.parametrize(
    ("samples", "micro", "size"), [(24, 2, 3), (7, 1, 4), (31, 3, 2), (10, 5, 1), (64, 4, 4)]
)
def test_cyclic_epoch_gives_no_sample_twice(samples, micro, size, sharding):
    spec = SamplerSpec(samples, micro, 0, size, CYCLIC, seed=3, data_sharding=sharding)
    epochs = []
    for epoch in range(3):
        steps = range(epoch * spec.samples_per_epoch, (epoch + 1) * spec.samples_per_epoch, spec.stride)
        seen = np.concatenate([batch_indices(s, consumed) for consumed in steps for s in ranks(spec)])
        assert seen.size == np.unique(seen).size == samples - samples % (micro * size)
        assert 0 <= seen.min() <= seen.max() < samples
        epochs.append(seen.tolist())
    assert epochs[0] != epochs[1] != epochs[2] or samples < 10


@pytest.mark.parametrize("kind", [SINGLE, CYCLIC])
@pytest.mark.parametrize("sharding", [False, True])
def test_resume_continues_exactly_in_any_epoch(kind, sharding):
    """The offset within an epoch must be applied once: not again in the epochs after it (sharp edge 27)."""
    spec = SamplerSpec(200 if kind is SINGLE else 26, 2, 1, 3, kind, seed=5, data_sharding=sharding)
    whole = [batch.tolist() for batch in islice(BatchSampler(spec), 20)]  # five cyclic epochs of 4 steps
    for done in range(20):
        resumed = BatchSampler(spec, consumed_samples=done * spec.stride)
        assert [batch.tolist() for batch in islice(resumed, 20 - done)] == whole[done:]
        assert resumed.consumed_samples == 20 * spec.stride
        assert batch_indices(spec, done * spec.stride).tolist() == whole[done]


def test_batch_size_ramp_is_only_more_micro_batches():
    spec = SamplerSpec(64, 2, 0, 2, CYCLIC, seed=1)
    whole = [batch.tolist() for batch in islice(BatchSampler(spec), 10)]
    consumed, ramped = 0, []
    for micro_batches in (1, 1, 2, 2, 4):
        sampler = BatchSampler(spec, consumed)
        ramped += [next(sampler).tolist() for _ in range(micro_batches)]
        consumed = sampler.consumed_samples
    assert ramped == whole


def test_cyclic_follows_megatron_for_seed_zero():
    """Permutations of torch's generator seeded with the epoch; ranks stride over one, or own a part each."""
    import torch

    for epoch in (0, 1):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).tolist()
        spec = SamplerSpec(25, 2, 0, 3, CYCLIC)
        consumed = epoch * 24 + 6
        assert [batch_indices(s, consumed).tolist() for s in ranks(spec)] == [
            [order[6 + r], order[9 + r]] for r in range(3)
        ]
        part = torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()
        sharded = replace(spec, data_sharding=True)
        assert [batch_indices(s, consumed).tolist() for s in ranks(sharded)] == [
            [8 * r + part[2], 8 * r + part[3]] for r in range(3)
        ]


def test_seed_and_epoch_do_not_collide():
    spec = SamplerSpec(1000, 1, kind=CYCLIC)
    orders = {
        (seed, epoch): tuple(epoch_permutation(replace(spec, seed=seed), epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9


def test_kind_may_be_its_name():
    assert SamplerSpec(8, 1, kind="cyclic").kind is CYCLIC


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"micro_batch_size": 0}, "`micro_batch_size`"),
        ({"data_parallel_rank": 2}, "`data_parallel_rank`"),
        ({"data_parallel_rank": -1}, "`data_parallel_rank`"),
        ({"num_samples": 3}, "`num_samples` must be at least one micro-batch"),
    ],
)
def test_impossible_values(change, words):
    with pytest.raises(DataError, match=words):
        SamplerSpec(**{"num_samples": 8, "micro_batch_size": 2, "data_parallel_size": 2, **change})


def test_consumed_samples_that_fit_no_micro_batch():
    with pytest.raises(DataError, match=r"multiple of micro_batch_size \* data_parallel_size \(4\)"):
        batch_indices(SamplerSpec(40, 2, 0, 2, CYCLIC), 6)
    with pytest.raises(DataError, match="at least 0"):
        batch_indices(SamplerSpec(40, 2), -1)
