"""Checkpoints of an engine: continuing equals not stopping, on any layout."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from megazero.deepspeed.checkpoint import decode, encode
from megazero.errors import CheckpointError, ConfigError
from megazero.mpu.context import ParallelContext, solo_context
from tests.deepspeed.user_models import (
    ADAMW,
    Encoder,
    Tied,
    batch,
    build,
    on_ranks,
    settings,
    start,
    train_engine,
)

SCHEDULE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}}


def config(stage: int, **more) -> dict:
    return settings(stage, 2, optimizer=ADAMW, scheduler=SCHEDULE, **more)


@pytest.mark.parametrize(
    "more", [{}, {"fp16": {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2}}]
)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_continuing_equals_not_stopping(tmp_path, stage, more):
    def whole(context: ParallelContext):
        engine = start(context, build(Encoder), config(stage, **more))
        train_engine(engine, context, range(3))
        engine.save_checkpoint(tmp_path, client_state={"epoch": 2, "rng": torch.arange(3)})
        record = train_engine(engine, context, range(3, 6))
        return record, engine.progress(), engine.optimizer.scaler_state, engine.get_lr()

    def resumed(context: ParallelContext):
        engine = start(context, build(Encoder, seed=7), config(stage, **more))
        path, client = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step3")
        assert client["epoch"] == 2
        assert client["rng"].tolist() == [0, 1, 2]
        record = train_engine(engine, context, range(3, 6))
        return record, engine.progress(), engine.optimizer.scaler_state, engine.get_lr()

    for (expected, *facts), (found, *others) in zip(on_ranks(2, whole), on_ranks(2, resumed), strict=True):
        assert (found.losses, found.norms, others) == (expected.losses, expected.norms, facts)
        assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())


@pytest.mark.parametrize(("saved", "loaded"), [((3, 2), (1, 4)), ((0, 1), (3, 2)), ((2, 3), (0, 1))])
def test_any_layout_loads_it(tmp_path, saved, loaded):
    def save(context: ParallelContext):
        engine = start(context, build(Tied), config(saved[0]))
        train_engine(engine, context, range(2))
        engine.save_checkpoint(tmp_path, tag="best")
        return {spec.name: kinds for spec, kinds in engine.optimizer.shards.full_state()}

    def load(context: ParallelContext):
        engine = start(context, build(Tied, seed=7), config(loaded[0]))
        assert engine.load_checkpoint(tmp_path, tag="best")[1] == {}
        return {spec.name: kinds for spec, kinds in engine.optimizer.shards.full_state()}

    expected = on_ranks(saved[1], save)[0]
    for found in on_ranks(loaded[1], load):
        assert found.keys() == expected.keys()
        for name, kinds in expected.items():
            assert all(torch.equal(found[name][kind], value) for kind, value in kinds.items())


def test_the_latest_is_named_unless_it_is_not_to_be(tmp_path):
    engine = start(solo_context(), build(Tied), config(0))
    assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.save_checkpoint(tmp_path, tag="a")
    engine.save_checkpoint(tmp_path, tag="b", save_latest=False)
    assert (tmp_path / "latest").read_text() == "a\n"
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "a")
    assert engine.load_checkpoint(tmp_path, "b")[0] == str(tmp_path / "b")
    with pytest.raises(CheckpointError, match="must hold a checkpoint, but has none"):
        engine.load_checkpoint(tmp_path, "c")


def test_parts_can_be_left_out(tmp_path):
    engine = start(solo_context(), build(Tied), config(1))
    train_engine(engine, engine.context, range(3))
    engine.save_checkpoint(tmp_path)

    def fresh(**choices):
        other = start(solo_context(), build(Tied, seed=7), config(1))
        other.load_checkpoint(tmp_path, **choices)
        states = other.optimizer.state_dict()["state"].values()
        moment = any(kinds["exp_avg"].any() for kinds in states if "exp_avg" in kinds)  # not of frozen ones
        steps = other.lr_scheduler.last_batch_iteration
        return other, (moment, steps, other.global_steps)

    assert fresh()[1] == (True, 2, 3)
    assert fresh(load_optimizer_states=False)[1] == (False, 2, 3)
    assert fresh(load_lr_scheduler_states=False)[1] == (True, -1, 3)
    other, found = fresh(load_module_only=True)
    assert found == (False, -1, 0)
    for name, value in engine.module_state_dict().items():
        assert torch.equal(other.module_state_dict()[name], value)


def test_another_model_is_refused_and_taken_in_part_where_asked(tmp_path):
    class Wider(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.full((3,), 5.0))

    engine = start(solo_context(), build(Tied), config(1))
    engine.save_checkpoint(tmp_path)
    other = start(solo_context(), build(Wider, seed=7), config(1))
    with pytest.raises(CheckpointError, match="extra is missing"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_module_strict=False)
    weights = other.module_state_dict()
    assert weights["extra"].tolist() == [5.0] * 3
    assert torch.equal(weights["up.weight"], engine.module_state_dict()["up.weight"])


def test_an_optimizer_with_other_state_is_refused(tmp_path):
    engine = start(solo_context(), build(Tied), config(1))
    engine.save_checkpoint(tmp_path)
    model = build(Tied)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = start(solo_context(), model, settings(1, 2), optimizer=sgd)
    with pytest.raises(CheckpointError, match="momentum_buffer is missing"):
        other.load_checkpoint(tmp_path)


def test_gradients_of_a_step_that_had_begun_are_dropped(tmp_path):
    engine = start(solo_context(), build(Tied), config(0))
    engine.save_checkpoint(tmp_path)
    expected = train_engine(engine, engine.context, range(2)).losses
    other = start(solo_context(), build(Tied), config(0))
    other.backward(other(*batch(8, 0, 0)))
    other.step()
    other.load_checkpoint(tmp_path)
    assert train_engine(other, other.context, range(2)).losses == expected


def test_a_schedule_of_torch_comes_back(tmp_path):
    """MultiStepLR keeps numbers as keys, which JSON alone would turn into text."""

    def make():
        model = build(Tied)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)
        return start(solo_context(), model, settings(), optimizer=optimizer, lr_scheduler=schedule)

    engine = make()
    train_engine(engine, engine.context, range(3))
    engine.save_checkpoint(tmp_path)
    other = make()
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == engine.get_lr() == pytest.approx([0.1])
    train_engine(other, other.context, range(3, 4))
    assert other.get_lr() == pytest.approx([0.01])


def test_what_is_saved_is_plain(tmp_path):
    tensors: dict[str, torch.Tensor] = {}
    value = {
        1: (2.5, None),
        "two": [True, {"x": torch.ones(2)}],
        "count": Counter({3: 4}),
        "big": float("inf"),
    }
    back = decode(encode(value, "client", tensors), tensors)
    assert back.pop("two")[1]["x"].tolist() == [1.0, 1.0]
    assert back == {1: (2.5, None), "count": {3: 4}, "big": float("inf")}
    engine = start(solo_context(), build(Tied), config(0))
    with pytest.raises(
        CheckpointError, match=r"`client.where` must be made of numbers, .* but holds a PosixPath"
    ):
        engine.save_checkpoint(tmp_path, client_state={"where": tmp_path})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_for_use_elsewhere(tmp_path, name):
    def work(context: ParallelContext):
        refused = start(context, build(Encoder), config(3, bf16={"enabled": True}))
        assert refused.save_16bit_model(tmp_path / "none") is False
        more = {"bf16": {"enabled": True}}
        settings_ = config(3, **more)
        settings_["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        engine = start(context, build(Encoder), settings_)
        assert engine.save_16bit_model(tmp_path / "out", name) is True
        return engine.module_state_dict()

    weights = on_ranks(2, work)[0]
    assert not (tmp_path / "none").exists()
    path = tmp_path / "out" / name
    if name.endswith("bin"):
        saved = torch.load(path, weights_only=True)
    else:
        from safetensors.torch import load_file

        saved = load_file(path)
    assert saved.keys() == weights.keys() == build(Encoder).state_dict().keys()
    assert all(torch.equal(saved[key], value) for key, value in weights.items())
    assert saved["head.weight"].dtype == torch.bfloat16
    assert torch.equal(saved["head.weight"], saved["embedding.weight"])


def test_a_failure_to_write_is_every_ranks(tmp_path):
    (tmp_path / "file").write_text("")

    def work(context: ParallelContext):
        engine = start(context, build(Tied), config(0))
        with pytest.raises(CheckpointError, match="rank 0 could not"):
            engine.save_16bit_model(tmp_path / "file")
        with pytest.raises(CheckpointError, match="rank 0 could not"):
            engine.save_checkpoint(tmp_path / "file")
        return True

    assert on_ranks(2, work) == [True, True]


def test_the_optimizers_own_state_dict_comes_back_on_the_same_layout():
    def work(context: ParallelContext):
        engine = start(context, build(Tied), config(3))
        train_engine(engine, context, range(2))
        state = {**engine.optimizer.state_dict()}
        state["state"] = {i: {k: t.clone() for k, t in kinds.items()} for i, kinds in state["state"].items()}
        expected = train_engine(engine, context, range(2, 4))
        engine.optimizer.load_state_dict(state)
        engine.lr_scheduler.last_batch_iteration = 1
        found = train_engine(engine, context, range(2, 4))
        with pytest.raises(ConfigError, match="`state_dict` must be of the same model and layout"):
            engine.optimizer.load_state_dict({**state, "state": {}})
        return found.losses == expected.losses

    assert on_ranks(2, work) == [True, True]
