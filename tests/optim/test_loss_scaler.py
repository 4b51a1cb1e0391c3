from __future__ import annotations

import pytest

from megazero.config.tree.precision import PrecisionConfig
from megazero.errors import ConfigError, NumericsError
from megazero.optim.loss_scaler import (
    LARGEST_SCALE,
    DynamicLossScaler,
    ScalerState,
    StaticLossScaler,
    build_loss_scaler,
)
from tests.tables import over_table


def run(scaler, outcomes):
    """States after each step; `x` is an overflow, `.` a good step."""
    state, states = scaler.initial(), []
    for outcome in outcomes:
        state = scaler.update(state, outcome == "x")
        states.append((state.scale, state.growth_tracker, state.hysteresis_left))
    return states


@over_table(
    ("outcomes", "expected"),
    [
        ("...", [(16, 1, 2), (16, 2, 2), (32, 0, 2)]),
        ("xx", [(16, 0, 1), (8, 0, 0)]),
        ("xxx", [(16, 0, 1), (8, 0, 0), (4, 0, 0)]),
        ("x.x", [(16, 0, 1), (16, 1, 1), (8, 0, 0)]),
        ("..x...", [(16, 1, 2), (16, 2, 2), (16, 0, 1), (16, 1, 1), (16, 2, 1), (32, 0, 2)]),
        ("xx...x", [(16, 0, 1), (8, 0, 0), (8, 1, 0), (8, 2, 0), (16, 0, 2), (16, 0, 1)]),
        ("xxxxxx", [(16, 0, 1), (8, 0, 0), (4, 0, 0), (2, 0, 0), (2, 0, 0), (2, 0, 0)]),
    ],
)
def test_scale_growth_and_hysteresis(outcomes, expected):
    scaler = DynamicLossScaler(initial_scale=16.0, min_scale=2.0, window=3, hysteresis=2)
    assert run(scaler, outcomes) == expected


def test_equals_megatron_core_step_by_step():
    grad_scaler = pytest.importorskip("megatron.core.optimizer.grad_scaler")
    torch = pytest.importorskip("torch")
    reference = grad_scaler.DynamicGradScaler.__new__(grad_scaler.DynamicGradScaler)
    reference.__dict__.update(
        _scale=torch.tensor([64.0]),
        min_scale=torch.tensor([1.0]),
        growth_factor=torch.tensor([2.0]),
        backoff_factor=torch.tensor([0.5]),
        growth_interval=4,
        hysteresis=3,
        _growth_tracker=0,
        _hysteresis_tracker=3,
    )
    scaler = DynamicLossScaler(initial_scale=64.0, window=4, hysteresis=3)
    state = scaler.initial()
    for outcome in "x.xx....x....xx.xxxx........x...xxxxxxxxxxxx........":
        reference.update(outcome == "x")
        state = scaler.update(state, outcome == "x")
        assert state.scale == reference._scale.item()
        assert state.growth_tracker == reference._growth_tracker
        assert state.hysteresis_left == max(reference._hysteresis_tracker, 0)


def test_overflow_forever_at_the_floor_ends_the_training():
    scaler = DynamicLossScaler(initial_scale=2.0, min_scale=1.0, hysteresis=1, floor_patience=3)
    state = scaler.initial()
    for _ in range(3):  # one to reach the floor, two at it
        state = scaler.update(state, True)
    assert state == ScalerState(1.0, 0, 0, 2)
    with pytest.raises(NumericsError, match=r"smallest loss scale \(1.0\).*3 steps in a row"):
        scaler.update(state, True)


def test_a_good_step_at_the_floor_starts_the_count_anew():
    scaler = DynamicLossScaler(initial_scale=1.0, hysteresis=1, floor_patience=2)
    state = scaler.initial()
    for _ in range(10):
        state = scaler.update(state, True)
        assert state.overflows_at_floor == 1
        state = scaler.update(state, False)
        assert state.overflows_at_floor == 0


def test_the_scale_never_grows_to_infinity():
    scaler = DynamicLossScaler(initial_scale=LARGEST_SCALE / 2, window=1)
    assert [scale for scale, _, _ in run(scaler, "...")] == [LARGEST_SCALE] * 3


@pytest.mark.parametrize(
    ("scaler", "scale"), [(StaticLossScaler(128.0), 128.0), (StaticLossScaler(1.0), 1.0)]
)
def test_static_scales_never_move(scaler, scale):
    assert [s for s, _, _ in run(scaler, "xx..xxxx")] == [scale] * 8


def test_first_scale_below_the_floor_is_refused():
    with pytest.raises(ConfigError, match=r"`min_loss_scale` \(4.0\), but is 2.0"):
        DynamicLossScaler(initial_scale=2.0, min_scale=4.0)


@over_table(
    ("fields", "expected"),
    [
        ({"dtype": "fp32"}, StaticLossScaler(1.0)),
        ({"dtype": "bf16"}, StaticLossScaler(1.0)),
        ({"dtype": "fp16", "loss_scale": 512.0}, StaticLossScaler(512.0)),
        ({"dtype": "bf16", "loss_scale": 4.0}, StaticLossScaler(4.0)),
        ({"dtype": "fp16"}, DynamicLossScaler(2.0**32, 1.0, 1000, 2)),
        (
            {
                "dtype": "fp16",
                "initial_loss_scale": 64.0,
                "min_loss_scale": 2.0,
                "loss_scale_window": 7,
                "hysteresis": 5,
            },
            DynamicLossScaler(64.0, 2.0, 7, 5),
        ),
    ],
)
def test_scaler_of_a_configuration(fields, expected):
    assert build_loss_scaler(PrecisionConfig(**fields)) == expected
