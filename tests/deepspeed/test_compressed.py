"""DeepSpeed's 1-bit optimizers under `megazero.initialize`: as a JSON asks for them."""

from __future__ import annotations

import pytest
import torch

from megazero.deepspeed.optimizers.fused import CompressedOptimizer
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from tests.deepspeed.user_models import (
    ADAMW,
    Tied,
    assert_same,
    build,
    on_ranks,
    settings,
    start,
    train_engine,
    train_plain,
)

ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "betas": [0.8, 0.95]}
OWN = {
    "OneBitAdam": {"freeze_step": 2, "cuda_aware": False, "comm_backend_name": "nccl"},
    "ZeroOneAdam": {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4},
    "OneBitLamb": {"freeze_step": 2, "max_coeff": 0.3, "coeff_beta": 0.8},
}


def config(kind: str, stage: int = 0, **more) -> dict:
    return settings(stage, 2, optimizer={"type": kind, "params": {**ADAM, **OWN[kind], **more}})


@pytest.mark.parametrize("ranks", [1, 3])
def test_before_the_freeze_it_trains_as_adamw(ranks):
    told = settings(0, 2, optimizer={"type": "OneBitAdam", "params": ADAMW["params"]})

    def work(context: ParallelContext):
        return train_engine(start(context, build(Tied), told), context, range(4))

    model = build(Tied)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected = train_plain(model, plain, ranks=ranks, accumulation=2, steps=4)
    for record in on_ranks(ranks, work):
        assert_same(record, expected)


@pytest.mark.parametrize("kind", OWN)
def test_a_checkpoint_goes_on_bit_for_bit_after_the_freeze(tmp_path, kind):
    """After step 4, one that each replica of 0/1 Adam makes alone."""

    def whole(context: ParallelContext):
        engine = start(context, build(Tied), config(kind))
        train_engine(engine, context, range(4))
        engine.save_checkpoint(tmp_path)
        return train_engine(engine, context, range(4, 7))

    def resumed(context: ParallelContext):
        engine = start(context, build(Tied, seed=7), config(kind))
        engine.load_checkpoint(tmp_path)
        return train_engine(engine, context, range(4, 7))

    for expected, found in zip(on_ranks(2, whole), on_ranks(2, resumed), strict=True):
        assert (found.losses, found.norms) == (expected.losses, expected.norms)
        assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())
    on_ranks(3, resumed)  # another number of replicas goes on, too


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
def test_moments_are_corrected_unless_the_json_says_otherwise(kind):
    """As the 1-bit JSONs of DeepSpeed's examples do: its first step is ``lr (1 - b1) / sqrt(1 - b2)``."""

    def moved(**more) -> torch.Tensor:
        def work(context: ParallelContext):
            model = torch.nn.Linear(3, 1, bias=False)
            before = model.weight.detach().clone()
            params = {"lr": 0.1, "eps": 0.0, "amsgrad": False, "eps_inside_sqrt": False, **more}
            told = {"train_batch_size": 1, "optimizer": {"type": kind, "params": params}}
            engine = start(context, model, told)
            engine.backward(engine(torch.ones(1, 3)).sum())
            engine.step()
            return before - engine.module.weight

        return on_ranks(1, work)[0]

    plain = torch.full((1, 3), 0.1)
    torch.testing.assert_close(moved(), plain)
    torch.testing.assert_close(moved(bias_correction=True), plain)
    torch.testing.assert_close(moved(bias_correction=False), plain * 0.1 / 0.001**0.5)


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("stage", [1, 3])
def test_sharded_state_is_refused(kind, stage):
    with pytest.raises(ConfigError, match="`stage` must be 0 for .*, which sums whole gradients itself"):
        on_ranks(2, lambda context: start(context, build(Tied), config(kind, stage)))


@pytest.mark.parametrize("name", ["exp_avg_mask", "non_freeze"])
def test_options_of_groups_without_a_counterpart_are_refused(name):
    groups = [{"params": list(build(Tied).parameters()), name: True}]
    with pytest.raises(ConfigError, match=f"`{name}` must not be an option of a parameter group"):
        CompressedOptimizer("onebit-adam", groups, 0.1, betas=(0.9, 0.99), eps=1e-8, freeze_step=3)


def test_it_does_not_step_by_itself():
    optimizer = CompressedOptimizer(
        "onebit-adam", build(Tied).parameters(), 0.1, betas=(0.9, 0.99), eps=1e-8, freeze_step=3
    )
    with pytest.raises(ConfigError, match="`step` of onebit-adam must be called on the optimizer that"):
        optimizer.step()
