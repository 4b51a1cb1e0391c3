"""DeepSpeed's optimizers by themselves are torch's formulas, and groups keep their own options on shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero.deepspeed.initialize import initialize
from megazero.deepspeed.optimizers.adam import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
)
from megazero.deepspeed.optimizers.fused import FusedLamb
from megazero.deepspeed.optimizers.grouped_rule import GroupedRule, GroupRate
from megazero.deepspeed.optimizers.torch_rule import choose_rule
from megazero.mpu.context import ParallelContext, solo_context
from tests.deepspeed.user_models import (
    Tied,
    assert_same,
    build,
    on_ranks,
    settings,
    start,
    train_engine,
    train_plain,
)
from tests.tables import over_table

PAIRS = {
    "AdamW": (
        lambda p: FusedAdam(p, lr=0.02, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    ),
    "Adam": (
        lambda p: DeepSpeedCPUAdam(p, lr=0.02, weight_decay=0.1, adamw_mode=False),
        lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
    ),
    "Adagrad": (
        lambda p: DeepSpeedCPUAdagrad(p, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
    ),
}


def moved(make, steps=4):
    torch.manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(3, 5)), torch.nn.Parameter(torch.randn(4))]
    optimizer = make(weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    return weights


@over_table("name", PAIRS)
def test_by_themselves_they_are_torchs_formulas(name):
    ours, theirs = PAIRS[name]
    torch.testing.assert_close(moved(ours), moved(theirs))


def test_without_bias_correction_the_first_step_is_short():
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), 2.0)
    FusedAdam([weight], lr=0.1, bias_correction=False).step()
    # m = 0.2, v = 0.004
    torch.testing.assert_close(weight.detach(), torch.full((3,), -0.1 * 0.2 / 0.004**0.5))


def test_decay_apart_from_the_gradient_is_the_default():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.zeros(2)
    FusedAdam([weight], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.99))


def test_narrow_weights_are_widened_for_the_update():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    weight.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPULion([weight], lr=0.25)
    optimizer.step()
    assert weight.tolist() == [0.75, 0.75]
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float32


def groups(model, kind):
    first, *rest = [p for p in model.parameters() if p.requires_grad]
    return kind([{"params": [first], "betas": (0.5, 0.9), "eps": 1e-3}, {"params": rest}], lr=1e-2, eps=1e-4)


@over_table("kind", [torch.optim.AdamW, FusedAdam, torch.optim.Adam])
@over_table(("ranks", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_groups_with_betas_of_their_own_train_as_one_process_would(kind, ranks, stage):
    def work(context: ParallelContext):
        model = build(Tied)
        engine = start(context, model, settings(stage), optimizer=groups(model, kind))
        return train_engine(engine, context, range(3))

    model = build(Tied)
    expected = train_plain(model, groups(model, kind), ranks=ranks, accumulation=1, steps=3)
    for found in on_ranks(ranks, work):
        assert_same(found, expected)


def test_equal_rates_of_two_groups_are_kept_apart():
    assert GroupRate(0.1, 0) != GroupRate(0.1, 1)
    assert len({GroupRate(0.1, 0), GroupRate(0.1, 1), GroupRate(0.1, 0)}) == 2
    optimizer = groups(build(Tied), torch.optim.AdamW)
    assert isinstance(choose_rule(optimizer)(optimizer.param_groups), GroupedRule)


def test_lamb_tells_the_trust_ratios_of_its_last_step():
    """In the first step, the update of each element is its sign times 0.1 / sqrt(0.001)."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    length = 0.1 / 0.001**0.5
    expected = [float(p.detach().norm()) / (length * p.numel() ** 0.5) for p in models[0].parameters()]
    optimizers = [FusedLamb(model.parameters(), lr=0.01) for model in models]
    assert optimizers[0].get_lamb_coeffs() == []
    models[0](torch.ones(1, 3)).sum().backward()
    optimizers[0].step()
    config = settings(2, gradient_clipping=0.0)
    engine, *_ = initialize(model=models[1], optimizer=optimizers[1], config=config, mpu=solo_context())
    found: list[float] = []
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        found = found or optimizers[1].get_lamb_coeffs()
    for ratios in (optimizers[0].get_lamb_coeffs(), optimizers[1].get_lamb_coeffs(), found):
        assert len(ratios) == 2
    assert optimizers[0].get_lamb_coeffs() == pytest.approx(expected, rel=1e-4)
    assert sorted(found) == pytest.approx(sorted(expected), rel=1e-4)
