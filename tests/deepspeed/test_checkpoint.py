"""Checkpoints of an engine: continuing equals not stopping, on any layout."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from megazero.deepspeed.checkpoint.plain import decode, encode
from megazero.deepspeed.zero import GatheredParameters
from megazero.deepspeed.zero_to_fp32 import SCRIPTS, get_fp32_state_dict_from_zero_checkpoint
from megazero.errors import CheckpointError, CommunicationError, ConfigError
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
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
    with pytest.warns(UserWarning, match="nothing is loaded: .*latest` must name .* has nothing in it"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    (tmp_path / "global_step9").mkdir()
    with pytest.warns(UserWarning, match="has global_step9; correct the path"):
        engine.load_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, tag="a")
    engine.save_checkpoint(tmp_path, tag="b", save_latest=False)
    assert (tmp_path / "latest").read_text() == "a\n"
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "a")
    assert engine.load_checkpoint(tmp_path, "b")[0] == str(tmp_path / "b")
    with pytest.raises(
        CheckpointError, match="must hold a checkpoint, but has nothing, for it does not exist"
    ):
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
    with pytest.raises(CheckpointError, match=r"`x.where` must be made of numbers, .* but holds a PosixPath"):
        encode({"where": tmp_path}, "x", tensors)


class Callback:
    """A class that no file may make by itself."""

    def __init__(self) -> None:
        self.best = 3.5


def test_the_scripts_own_objects_come_back_if_they_are_known_or_trusted(tmp_path, monkeypatch):
    engine = start(solo_context(), build(Tied), config(0))
    known = {"where": tmp_path, "args": Namespace(lr=0.5, data=["a"]), "order": np.arange(3)}
    engine.save_checkpoint(tmp_path, "known", client_state=known)
    back = engine.load_checkpoint(tmp_path, "known")[1]
    assert back["order"].tolist() == [0, 1, 2]
    assert {**back, "order": None} == {**known, "order": None}
    engine.save_checkpoint(tmp_path, "whole", client_state=Namespace(epoch=3))
    assert engine.load_checkpoint(tmp_path, "whole")[1] == {"epoch": 3}
    engine.save_checkpoint(tmp_path, "other", client_state={"epoch": 3, "callback": Callback()})
    with pytest.raises(CheckpointError, match=r"`client.callback` must .*Callback.*MEGAZERO_TRUST_PICKLE=1"):
        engine.load_checkpoint(tmp_path, "other")
    monkeypatch.setenv("MEGAZERO_TRUST_PICKLE", "1")
    assert engine.load_checkpoint(tmp_path, "other")[1]["callback"].best == 3.5
    with pytest.raises(CheckpointError, match="`client.f` must be an object that can be pickled"):
        engine.save_checkpoint(tmp_path, "bad", client_state={"f": lambda: 0})
    assert not (tmp_path / "bad").exists()


def test_the_scripts_keys_are_its_own(tmp_path):
    engine = start(solo_context(), build(Tied), config(2))
    client = {"module": "mine", "lr_scheduler": 7, "global_steps": "x", "optimizer": None}
    engine.save_checkpoint(tmp_path, client_state=client)
    assert engine.load_checkpoint(tmp_path)[1] == client


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_can_stay_out_and_a_strict_load_leaves_them(tmp_path, stage):
    def work(context: ParallelContext):
        engine = start(context, build(Tied), config(stage))
        train_engine(engine, context, range(2))
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        other = start(context, build(Tied, seed=7), config(stage))
        before = other.module_state_dict()
        other.load_checkpoint(tmp_path)
        return engine.module_state_dict(), before, other.module_state_dict()

    saved, before, after = on_ranks(2, work)[0]
    for name, value in after.items():
        assert torch.equal(value, (before if name.startswith("frozen") else saved)[name]), name
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert "frozen.weight" not in trained
    assert "up.weight" in trained


@pytest.mark.parametrize("stage", [0, 3])
def test_a_save_a_step_and_a_load_equal_the_save(tmp_path, stage):
    def work(context: ParallelContext):
        engine = start(context, build(Encoder), config(stage, bf16={"enabled": True}))
        train_engine(engine, context, range(1))
        engine.save_checkpoint(tmp_path)
        expected = train_engine(engine, context, range(1, 3))
        engine.load_checkpoint(tmp_path)
        return train_engine(engine, context, range(1, 3)).losses, expected.losses

    for found, expected in on_ranks(2, work):
        assert found == expected


@pytest.mark.parametrize(("mode", "outcome"), [("Warn", "warns"), ("Ignore", "takes"), ("Fail", "fails")])
def test_tags_that_differ_are_one_or_an_error(tmp_path, mode, outcome):
    def work(context: ParallelContext):
        engine = start(context, build(Tied), config(1, checkpoint={"tag_validation": mode}))
        if outcome == "fails":
            with pytest.raises(CheckpointError, match="is 'r0' on rank 0 and 'r1' on rank 1"):
                engine.save_checkpoint(tmp_path, tag=f"r{context.rank}")
            return True
        return engine.save_checkpoint(tmp_path, tag=f"r{context.rank}")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert on_ranks(2, work) == [True, True]
    assert any("is 'r0' on rank 0" in str(w.message) for w in caught) == (outcome == "warns")
    if outcome != "fails":
        assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "r0", *sorted(SCRIPTS)]


def test_a_rank_that_does_not_come_along_is_named(tmp_path):
    world = ThreadWorld(2, timeout=0.5)
    engines = world.run(
        lambda rank: start(thread_context(world, ProcessGrid(dp=2), rank), build(Tied), config(1))
    )
    with pytest.raises(CommunicationError, match=r"`save_checkpoint` must be called by every rank.*rank"):
        engines[0].save_checkpoint(tmp_path)


@pytest.mark.parametrize("folder", [None, "", 3])
def test_a_folder_must_be_one(folder):
    engine = start(solo_context(), build(Tied), config(0))
    with pytest.raises(CheckpointError, match="`save_dir` must be the path of a folder"):
        engine.save_checkpoint(folder)
    with pytest.raises(CheckpointError, match="`load_dir` must be the path of a folder"):
        engine.load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="`save_dir` must be the path of a folder"):
        engine.save_16bit_model(folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_function_of_the_script_can_load_weights(tmp_path, stage):
    def work(context: ParallelContext):
        engine = start(context, build(Tied), config(stage))
        train_engine(engine, context, range(1))
        engine.save_checkpoint(tmp_path)

        def load(src, dst):
            own = dict(dst.named_parameters())
            own["up.weight"].data.copy_(src["up.weight"] * 2)

        other = start(context, build(Tied, seed=7), config(stage))
        other.load_checkpoint(tmp_path, custom_load_fn=load)
        return engine.module_state_dict(), other.module_state_dict(), build(Tied, seed=7).state_dict()

    saved, found, fresh = on_ranks(2, work)[1]
    assert torch.equal(found["up.weight"], saved["up.weight"] * 2)
    assert torch.equal(found["down.weight"], fresh["down.weight"])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_dict_goes_in_and_out(stage):
    def work(context: ParallelContext):
        state = build(Tied).state_dict()
        engine = start(context, build(Tied, seed=7), config(stage))
        engine.load_module_state_dict({"module": state})
        out = engine.module_state_dict(prefix="m.")
        train_engine(engine, context, range(1))  # it trains on from there
        with pytest.raises(CheckpointError, match="up.bias is missing"):
            engine.load_module_state_dict({"module": {k: v for k, v in state.items() if k != "up.bias"}})
        with pytest.raises(CheckpointError, match="more is not used"):
            engine.load_module_state_dict({"module": {**state, "more": torch.ones(1)}})
        engine.load_module_state_dict({"module": {"up.bias": torch.ones(16)}}, strict=False)
        assert engine.module_state_dict()["up.bias"].tolist() == [1.0] * 16
        return state, out

    for state, out in on_ranks(2, work):
        assert {name.removeprefix("m.") for name in out} == state.keys()
        assert all(torch.equal(out[f"m.{name}"], value) for name, value in state.items())


def test_whole_weights_are_rank_0s_alone_and_sharded_ones_say_how_to_get_them():
    def work(context: ParallelContext):
        model = build(Encoder)
        start(context, model, config(3))
        engine = start(context, model, config(3))
        assert {len(part._state_dict_hooks) for part in model.modules()} == {1}
        with pytest.warns(UserWarning, match="gives empty tensors for weights that"):
            empty = engine.module.state_dict()
        assert {value.numel() for name, value in empty.items() if name in dict(model.named_parameters())} == {
            0
        }
        with GatheredParameters(engine.module.parameters()):
            gathered = {name: value.clone() for name, value in engine.module.state_dict().items()}
        state = engine._zero3_consolidated_16bit_state_dict()
        assert engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True) is None or state
        with pytest.raises(ConfigError, match="`keep_vars` must be False at stage 3"):
            engine.module_state_dict(keep_vars=True)
        lower = start(context, build(Tied), config(2))
        with pytest.raises(ConfigError, match="`stage` must be 3"):
            lower._zero3_consolidated_16bit_state_dict()
        assert "frozen.bias" not in lower.module_state_dict(keep_vars=True, exclude_frozen_parameters=True)
        return gathered, state

    (gathered, first), (_, second) = on_ranks(2, work)
    assert second is None
    assert all(torch.equal(first[name], value) for name, value in gathered.items())
    assert first["head.weight"] is first["embedding.weight"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_for_use_elsewhere(tmp_path, name):
    def work(context: ParallelContext):
        refused = start(context, build(Encoder), config(3, bf16={"enabled": True}))
        with pytest.warns(UserWarning, match="is not written") if context.rank == 0 else nullcontext():
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
