"""Slices of parameters, and the keys of random streams."""

from __future__ import annotations

import torch

from megazero.mpu import Init, ParamSpec, ProcessGrid, SampleStreams, ThreadWorld, derive_key, thread_context


def test_padded_vocabulary_slices():
    spec = ParamSpec("embedding", (5, 2), Init("normal", 0.02), 0, padded_size=8)
    assert spec.local_shape(4) == (2, 2)
    assert spec.offset(3, 4) == (6, 0)
    whole = torch.arange(10.0).view(5, 2)
    assert spec.shard(whole, 2, 4).tolist() == [[8.0, 9.0], [0.0, 0.0]]
    assert spec.shard(whole, 3, 4).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_unshard_undoes_shard_on_every_dim():
    for shard_dim in (None, 0, 1, 2):
        spec = ParamSpec("w", (4, 8, 4), Init("zeros"), shard_dim)
        whole = torch.randn(4, 8, 4)
        world = ThreadWorld(4)

        def work(rank, world=world, spec=spec, whole=whole):
            context = thread_context(world, ProcessGrid(tp=4), rank)
            return spec.unshard(spec.shard(whole, rank, 4), context.tp)

        for result in world.run(work):
            assert torch.equal(result, whole)


def test_a_replicated_parameter_counts_once():
    spec = ParamSpec("bias", (4,), Init("zeros"))
    assert [spec.counts_on(rank) for rank in range(3)] == [True, False, False]
    sliced = ParamSpec("weight", (6,), Init("zeros"), 0)
    assert all(sliced.counts_on(rank) for rank in range(3))


def test_keys_are_fixed_and_distinct():
    # Literal: a change here changes every model's initial weights.
    assert derive_key(1234, "init", "layers.0.mlp.up.weight") == 4269849974569900138
    keys = {derive_key(seed, name, i) for seed in (1, 2) for name in ("a", "b") for i in range(100)}
    assert len(keys) == 400
    assert derive_key(1, "2") != derive_key(1, 2)
    assert derive_key(1, "a", "b") != derive_key(1, "a/s:b")


def test_a_sample_keeps_its_stream_in_any_micro_batch():
    whole = SampleStreams(7, (4, 5, 6, 7)).keys("hidden", 3)
    assert SampleStreams(7, (6,)).keys("hidden", 3).item() == whole[2].item()
