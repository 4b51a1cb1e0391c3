"""Batch sizes over time and lengths in every unit: small cases drawn by hand, and laws."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.config.derive import (
    BatchRamp,
    LrLengths,
    TrainLength,
    batch_ramp,
    chunks_per_stage,
    data_parallel_size,
    global_batch_size,
    lr_lengths,
    num_chunks,
    num_micro_batches,
    padded_vocab_size,
    schedule_kind,
    train_length,
)
from megazero.errors import ConfigError
from tests.config.samples import make_config


@pytest.mark.parametrize(
    ("vocab", "divisible", "tensor", "padded"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (128, 128, 1, 128),
        (1, 1, 3, 3),
        (30522, 128, 2, 30720),
    ],
)
def test_padded_vocab_size(vocab: int, divisible: int, tensor: int, padded: int) -> None:
    assert padded_vocab_size(vocab, divisible, tensor) == padded


def test_data_parallel_size() -> None:
    config = make_config({"parallel.tensor_model_parallel_size": 2})
    assert data_parallel_size(config, 8) == 4
    for world in (7, 0, -2):
        with pytest.raises(ConfigError, match="must be a multiple of"):
            data_parallel_size(config, world)


@pytest.mark.parametrize(
    ("stages", "changes", "per_stage", "kind"),
    [
        (1, {}, 1, "1f1b"),
        (4, {}, 1, "1f1b"),
        (4, {"pipeline_schedule": "gpipe"}, 1, "gpipe"),
        (1, {"pipeline_schedule": "zb-v"}, 2, "zb-v"),
        (4, {"pipeline_schedule": "zb-v"}, 2, "zb-v"),
        (4, {"num_layers_per_virtual_pipeline_stage": 1}, 3, "interleaved"),
        (4, {"num_layers_per_virtual_pipeline_stage": 3}, 1, "1f1b"),
        (2, {"num_layers_per_virtual_pipeline_stage": 3}, 2, "interleaved"),
        (3, {"num_virtual_stages_per_pipeline_rank": 2}, 2, "interleaved"),
        (3, {"num_virtual_stages_per_pipeline_rank": 1}, 1, "1f1b"),
        (2, {"pipeline_schedule": "interleaved"}, 1, "interleaved"),
    ],
)
def test_chunks_and_schedule_of_twelve_layers(
    stages: int, changes: dict[str, Any], per_stage: int, kind: str
) -> None:
    parallel = {"pipeline_model_parallel_size": stages, **changes}
    config = make_config({"model.num_layers": 12, **{f"parallel.{k}": v for k, v in parallel.items()}})
    assert chunks_per_stage(config) == per_stage
    assert num_chunks(config) == stages * per_stage
    assert schedule_kind(config) == kind


def test_global_batch_size() -> None:
    assert global_batch_size(make_config(), 3) == 6
    assert global_batch_size(make_config({"batch.global_batch_size": 24}), 3) == 24


def test_ramp_by_hand() -> None:
    # 4 -> 12 in steps of 4 over 30 samples: each size is held for 15 samples
    ramp = BatchRamp(start=4, increment=4, ramp_samples=30, final=12)
    sizes, consumed = [], 0
    for _ in range(9):
        sizes.append(ramp.at(consumed))
        consumed += sizes[-1]
    assert sizes == [4, 4, 4, 4, 8, 8, 12, 12, 12]
    assert ramp.at(14) == 4
    assert ramp.at(15) == 8
    assert ramp.at(29) == 8
    assert ramp.at(30) == 12
    assert list(ramp.stretches()) == [(4, 4), (8, 2), (12, None)]
    assert [ramp.samples_after(n) for n in range(8)] == [0, 4, 8, 12, 16, 24, 32, 44]
    assert [ramp.iterations_within(n) for n in (0, 3, 4, 15, 23, 24, 43, 44)] == [0, 0, 1, 3, 4, 5, 6, 7]
    assert [ramp.iterations_reaching(n) for n in (0, 3, 4, 15, 23, 24, 43, 44)] == [0, 1, 1, 4, 5, 5, 7, 7]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 6), st.integers(1, 200), st.integers(0, 40))
def test_lengths_agree_with_walking_the_ramp(
    start: int, increment: int, rungs: int, ramp_samples: int, iterations: int
) -> None:
    ramp = BatchRamp(start, increment, ramp_samples, start + rungs * increment)
    consumed = 0
    for step in range(iterations):
        assert ramp.samples_after(step) == consumed
        consumed += ramp.at(consumed)
    assert ramp.samples_after(iterations) == consumed
    assert ramp.iterations_within(consumed) == iterations
    assert ramp.iterations_reaching(consumed) == iterations
    assert ramp.iterations_reaching(consumed + 1) == iterations + 1
    assert ramp.iterations_within(consumed + ramp.at(consumed) - 1) == iterations


def test_micro_batches_follow_the_ramp() -> None:
    config = make_config({"batch.global_batch_size": 16, "batch.rampup_batch_size": (4, 4, 30)})
    assert batch_ramp(config, 2) == BatchRamp(4, 4, 30, 16)
    assert [num_micro_batches(config, consumed, 2) for consumed in (0, 9, 10, 20, 30)] == [1, 1, 2, 3, 4]
    assert num_micro_batches(make_config(), 1000, 2) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training.train_iters": 10}, TrainLength(10, 40, 1280)),
        ({"training.train_samples": 43}, TrainLength(10, 40, 1280)),
        ({"training.train_tokens": 1281}, TrainLength(11, 44, 1408)),
        ({"training.train_tokens": 1280}, TrainLength(10, 40, 1280)),
        # whichever comes first
        ({"training.train_iters": 10, "training.train_tokens": 300}, TrainLength(3, 12, 384)),
        ({"training.train_samples": 8, "training.train_tokens": 300}, TrainLength(2, 8, 256)),
    ],
)
def test_train_length(changes: dict[str, Any], expected: TrainLength) -> None:
    config = make_config({"training.train_iters": None, **changes})
    assert train_length(config, 2) == expected


def test_train_length_without_a_limit() -> None:
    with pytest.raises(ConfigError, match="must be set"):
        train_length(make_config({"training.train_iters": None}), 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, LrLengths("iters", 0, 100, None)),
        ({"optimizer.lr_warmup_iters": 7}, LrLengths("iters", 7, 100, None)),
        ({"optimizer.lr_warmup_fraction": 0.25}, LrLengths("iters", 25, 100, None)),
        ({"optimizer.lr_warmup_samples": 7}, LrLengths("samples", 7, 400, None)),
        ({"optimizer.lr_warmup_tokens": 7}, LrLengths("tokens", 7, 12800, None)),
        ({"optimizer.lr_decay_tokens": 99}, LrLengths("tokens", 0, 99, None)),
        ({"training.train_iters": None, "training.train_samples": 41}, LrLengths("samples", 0, 40, None)),
        (
            {"optimizer.lr_decay_style": "WSD", "optimizer.lr_wsd_decay_iters": 20},
            LrLengths("iters", 0, 100, 20),
        ),
    ],
)
def test_lr_lengths(changes: dict[str, Any], expected: LrLengths) -> None:
    assert lr_lengths(make_config(changes), 2) == expected
