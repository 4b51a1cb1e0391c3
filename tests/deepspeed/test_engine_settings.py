"""Settings of a JSON that an engine follows, and what a script finds of them on it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megazero.deepspeed.config.settings import read_settings
from megazero.deepspeed.engine.arguments import Mesh, mesh_of
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext, solo_context
from tests.deepspeed.user_models import ADAMW, MICRO, on_ranks, settings, start
from tests.tables import over_table


class Dropping(nn.Linear):
    """Notes the share of layers that it is told to keep."""

    def __init__(self):
        super().__init__(2, 1)
        self.told = []

    def forward(self, x, **rest):
        self.told.append(rest)
        return super().forward(x)


def test_the_share_of_layers_to_keep_is_told_in_training():
    drop = {"enabled": True, "theta": 0.5, "gamma": 0.1}
    engine = start(solo_context(), Dropping(), settings(1, optimizer=ADAMW, progressive_layer_drop=drop))
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    told = [{"progressive_layer_drop": True, "pld_theta": share} for share in (1.0, 1.0)]
    last = {"progressive_layer_drop": True, "pld_theta": pytest.approx(0.5 * math.exp(-0.1) + 0.5)}
    assert engine.module.told == [*told, last]
    assert engine.get_pld_theta() == pytest.approx(0.5 * math.exp(-0.2) + 0.5)
    assert (engine.pld_enabled(), engine.pld_params(), engine.pld_theta()) == (True, drop, 0.5)
    engine.eval()
    engine(torch.ones(1, 2))
    assert engine.module.told[-1] == {}


def test_no_share_of_layers_is_told_unless_asked():
    engine = start(solo_context(), nn.Linear(2, 1), settings(1, optimizer=ADAMW))
    assert engine.get_pld_theta() is None


def test_scripts_look_into_the_configuration():
    def work(context: ParallelContext):
        engine = start(context, nn.Linear(2, 1), settings(1, 2, optimizer=ADAMW))
        found = engine._config
        return found.train_batch_size, found.zero_config.stage, found.optimizer_name, found.world_size

    for found in on_ranks(2, work):
        assert found == (4 * MICRO, 1, "adamw", 2)


@pytest.mark.parametrize("timed", [True, False])
def test_timers_have_deepspeeds_names(timed):
    told = settings(1, 2, optimizer=ADAMW, wall_clock_breakdown=timed)
    engine = start(solo_context(), nn.Linear(2, 1), told)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    for name in ("fwd", "fwd_microstep", "bwd", "step"):
        assert (engine.timers(name).elapsed() > 0) == timed


def test_tolerated_overflows_come_back_at_every_good_step_if_asked():
    for consecutive in (True, False):
        fp16 = {"enabled": True, "hysteresis": 2, "consecutive_hysteresis": consecutive}
        engine = start(solo_context(), nn.Linear(2, 1), settings(1, optimizer=ADAMW, fp16=fp16))
        scaler = engine.states.scaler
        state = scaler.update(scaler.update(scaler.initial(), True), False)
        assert state.hysteresis_left == (2 if consecutive else 1)


def test_the_section_of_a_compressed_model_is_left_to_it():
    section = {"weight_quantization": {"shared_parameters": {"enabled": True}}}
    found = read_settings(settings(1, compression_training=section), 1)
    assert any("compression_training (`init_compression` reads it)" in note for note in found.notes)
    section["weight_quantization"]["shared_parameters"]["enabled"] = False
    assert read_settings(settings(1, compression_training=section), 1).notes == ()


@over_table(
    ("sizes", "mesh"),
    [
        ({}, None),
        ({"sequence_parallel_size": 1, "data_parallel_size": 1}, None),
        ({"sequence_parallel_size": 2}, Mesh(None, 2)),
        ({"sequence_parallel_size": 2, "data_parallel_size": 3}, Mesh(3, 2)),
    ],
)
def test_ranks_that_share_a_sequence(sizes, mesh):
    assert mesh_of(read_settings(settings(1, **sizes), 1).extras) == mesh


def test_a_layout_of_other_ranks_is_refused():
    Mesh(None, 2).check(3)
    with pytest.raises(ConfigError, match=r"replicas of 2 ranks each \(3\), but is 2"):
        Mesh(2, 2).check(3)
    with pytest.raises(ConfigError, match="`data_parallel_size` must"):
        start(None, nn.Linear(2, 1), settings(1, optimizer=ADAMW, data_parallel_size=2))
