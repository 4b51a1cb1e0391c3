"""An engine beside the plain loop: a script's own backward, engines in turns on one model, none to train."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import megazero
from megazero.deepspeed.config.shown import value_at
from megazero.deepspeed.engine.getters import GETTERS
from megazero.deepspeed.optimizers.optimizer import DeepSpeedOptimizer
from megazero.deepspeed.reports.timer import NoopTimer
from megazero.deepspeed.zero import GatheredParameters
from megazero.errors import CheckpointError, ConfigError, MegazeroError
from megazero.mpu.context import ParallelContext, solo_context
from tests.deepspeed.user_models import (
    ADAMW,
    Tied,
    assert_same,
    batch,
    build,
    on_ranks,
    settings,
    start,
    train_engine,
    train_plain,
)
from tests.source_tree import ROOT


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


class Own:
    """An engine whose backward the script runs itself."""

    def __init__(self, engine):
        self._engine = engine

    def __call__(self, *args):
        return self._engine(*args)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def backward(self, loss):
        loss.backward()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_of_the_scripts_own_trains_as_the_engines(stage, accumulation):
    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(stage, accumulation, optimizer=ADAMW))
        return train_engine(Own(engine), context, range(3))

    model = build(Tied)
    expected = train_plain(model, adamw(model), ranks=2, accumulation=accumulation, steps=3)
    assert_same(on_ranks(2, work)[0], expected)


def test_gradients_for_the_script_alone_are_no_backward():
    engine = start(solo_context(), build(Tied), settings(3, optimizer=ADAMW))
    loss = engine(*batch(0, 0, 0))
    torch.autograd.grad(loss, [engine.module.scale], retain_graph=True)
    with pytest.raises(MegazeroError, match="`step` must follow a backward"):
        engine.step()
    loss.backward()
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_that_fails_leaves_nothing_behind(stage):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("on the way")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
            self.fails = False

        def forward(self, x):
            x = self.first(x)
            return self.last(Fails.apply(x) if self.fails else x).sum()

    def weights(fail: bool):
        engine = start(solo_context(), build(Model), settings(stage, optimizer=ADAMW))
        for run in (lambda loss: loss.backward(), engine.backward):
            if fail:
                engine.module.fails = True
                with pytest.raises(ArithmeticError):
                    run(engine(torch.ones(2, 4)))
                engine.module.fails = False
            run(engine(torch.ones(2, 4)))
            engine.step()
        return engine.module_state_dict()

    torch.testing.assert_close(weights(True), weights(False), rtol=0, atol=0)


def test_a_loss_of_two_engines():
    def models():
        return build(lambda: nn.Linear(3, 1)), build(lambda: nn.Linear(3, 1), seed=1)

    x = torch.arange(6.0).reshape(2, 3)
    plain = models()
    optimizer = torch.optim.AdamW([p for m in plain for p in m.parameters()], lr=1e-2, weight_decay=0.1)
    own = models()
    config = {**settings(2, optimizer=ADAMW), "gradient_clipping": 0.0}
    engines = [start(solo_context(), model, config) for model in own]
    for _ in range(3):
        optimizer.zero_grad()
        (plain[0](x) - plain[1](x)).square().mean().backward()
        optimizer.step()
        (engines[0](x) - engines[1](x)).square().mean().backward()
        for engine in engines:
            engine.step()
    for theirs, mine in zip(plain, engines, strict=True):
        torch.testing.assert_close(mine.module_state_dict(), dict(theirs.state_dict()))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("drop", ["module", "None", "zeros"])
def test_gradients_that_a_script_drops_do_not_count(drop, bf16):
    """A GAN drops what the generator's loss has left in the discriminator; it was added to the next one."""

    def work(context: ParallelContext):
        config = settings(0, optimizer=ADAMW, gradient_clipping=0.0, bf16={"enabled": bf16})
        engine = start(context, build(lambda: nn.Linear(2, 1, bias=False)), config)
        kind = engine.module.weight.dtype
        engine(torch.full((1, 2), 7.0, dtype=kind)).sum().backward()
        if drop == "None":
            engine.module.weight.grad = None
        else:
            engine.module.zero_grad(set_to_none=drop == "module")
        engine(torch.full((1, 2), 1.0 + context.data.rank, dtype=kind)).sum().backward()
        return engine.module.weight.grad.clone()

    for shown in on_ranks(2, work):
        assert shown.dtype == (torch.bfloat16 if bf16 else torch.float32)
        torch.testing.assert_close(shown.float(), torch.full((1, 2), 1.5))


def test_a_step_after_all_gradients_have_been_dropped_changes_nothing():
    config = settings(0, optimizer={"type": "SGD", "params": {"lr": 1.0}})
    engine = start(solo_context(), build(lambda: nn.Linear(2, 1, bias=False)), config)
    before = engine.module.weight.detach().clone()
    engine(torch.ones(1, 2)).sum().backward()
    engine.module.zero_grad()
    engine.step()
    assert torch.equal(engine.module.weight.detach(), before)


def test_gradients_are_means_over_ranks_at_stage_zero():
    def work(context: ParallelContext):
        engine = start(context, build(lambda: nn.Linear(2, 1, bias=False)), settings(0, optimizer=ADAMW))
        engine.backward(engine(torch.full((1, 2), float(context.data.rank))).sum())
        shown = engine.module.weight.grad.clone()
        engine.step()
        assert engine.module.weight.grad is None
        return shown

    assert all(torch.equal(shown, torch.full((1, 2), 0.5)) for shown in on_ranks(2, work))


@pytest.mark.parametrize("stage", [0, 3])
def test_fp16_takes_a_scaled_loss_alone(stage):
    def trained(run):
        config = settings(stage, optimizer=ADAMW, fp16={"enabled": True, "initial_scale_power": 8})
        engine = start(solo_context(), build(Tied), config)
        for step in range(2):
            run(engine, engine(*batch(step, 0, 0)))
            engine.step()
        return engine.module_state_dict()

    scaled = trained(lambda engine, loss: engine.scale(loss).backward())
    torch.testing.assert_close(scaled, trained(lambda engine, loss: engine.backward(loss)))
    with pytest.raises(MegazeroError, match=r"must be of a scaled loss where the scale is 256"):
        trained(lambda engine, loss: loss.backward())


@pytest.mark.parametrize("second", [0, 2, 3])
@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_second_engine_takes_the_model_over(first, second):
    def work(context: ParallelContext):
        model = build(Tied)
        old = start(context, model, settings(first, optimizer=ADAMW))
        one = train_engine(old, context, range(2))
        loss = old(*batch(0, 0, 0))
        new = start(context, model, settings(second, optimizer=ADAMW))
        with pytest.raises(MegazeroError, match="`backward` must be called on the engine that the model has"):
            old.backward(loss)
        with pytest.raises(MegazeroError, match="`loss` must come from the engine that the model has now"):
            loss.backward()
        two = train_engine(new, context, range(2, 4))
        return [*one.losses, *two.losses]

    model = build(Tied)
    expected = []
    for steps in (range(2), range(2, 4)):
        optimizer = adamw(model)
        for step in steps:
            optimizer.zero_grad()
            loss = sum(model(*batch(step, 0, rank)) for rank in range(2)) / 2
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            expected.append(loss.item())
    torch.testing.assert_close(on_ranks(2, work)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_without_an_optimizer_an_engine_evaluates(stage):
    def work(context: ParallelContext):
        model = build(Tied)
        expected = model(*batch(0, 0, 0)).item()
        engine, optimizer, _, schedule = megazero.initialize(
            model=model, config=settings(stage), mpu=context, model_parameters=[]
        )
        assert (optimizer is None) == (stage != 3)  # there it is a DeepSpeedZeRoOffload
        assert schedule is None
        with torch.no_grad():
            assert engine(*batch(0, 0, 0)).item() == pytest.approx(expected, rel=1e-6)
        for call in (engine.backward, engine.scale):
            with pytest.raises(MegazeroError, match="must be called on an engine with an optimizer"):
                call(engine(*batch(0, 0, 0)))
        with pytest.raises(MegazeroError, match="`step` must be called on an engine with an optimizer"):
            engine.step()
        assert [p.requires_grad for p in model.parameters()].count(False) == 2  # as it was
        trains = start(context, model, settings(stage, optimizer=ADAMW))
        return train_engine(trains, context, range(2))

    model = build(Tied)
    expected = train_plain(model, adamw(model), ranks=2, accumulation=1, steps=2)
    assert_same(on_ranks(2, work)[0], expected)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_weights_that_are_frozen_later_stay(stage):
    """Although moments and weight decay would move them on; they go on when they are trained again."""
    sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}}
    lamb = {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    onebit = {"type": "ZeroOneAdam", "params": {"lr": 1e-2, "weight_decay": 0.1, "var_freeze_step": 1}}

    def work(context: ParallelContext, optimizer, more):
        engine = start(context, build(Tied), settings(stage, optimizer=optimizer, **more))
        module, seen = engine.module, []
        for step in range(4):
            module.up.requires_grad_(step in (0, 3))
            engine.backward(engine(*batch(step, 0, context.data.rank)))
            engine.step()
            with GatheredParameters(module.parameters()):
                seen.append([module.up.weight.clone(), module.down.weight.clone()])
        module.frozen.requires_grad_(True)
        engine.backward(engine(*batch(4, 0, context.data.rank)))
        with pytest.raises(ConfigError, match="must stay False, but is True for frozen.weight"):
            engine.step()
        return seen

    cases = [(ADAMW, {}), (sgd, {"bf16": {"enabled": True}}), (lamb, {})]
    for optimizer, more in [*cases, (onebit, {})] if stage == 0 else cases:
        before, *still, after = on_ranks(2, lambda context, o=optimizer, m=more: work(context, o, m))[0]
        for up, down in still:
            assert torch.equal(up, before[0]), optimizer
            assert not torch.equal(down, before[1]), optimizer
        assert not torch.equal(after[0], before[0]), optimizer


@pytest.mark.parametrize("stage", [1, 3])
def test_a_scripts_own_clipping_counts_on_no_number_of_ranks_where_state_is_sharded(stage):
    """On one rank alone it used to, unlike on two, and unlike in DeepSpeed."""

    def work(context: ParallelContext):
        engine = start(context, build(Tied), settings(stage, optimizer=ADAMW))
        engine.backward(engine(*batch(0, 0, context.data.rank)))
        shown = [param.grad for param in engine.module.parameters()]
        nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
        engine.step()
        return shown == [None] * len(shown), engine.get_global_grad_norm() > 1e-2

    assert on_ranks(1, work) == [(True, True)]


def test_a_destroyed_engine_leaves_the_weights():
    model = build(Tied)
    engine = start(solo_context(), model, settings(3, optimizer=ADAMW))
    train_engine(engine, engine.context, range(1))
    expected = engine.module_state_dict()
    engine.destroy()
    with pytest.raises(MegazeroError, match="`step` must be called on the engine that the model has now"):
        engine.step()
    with GatheredParameters(list(model.parameters())):
        torch.testing.assert_close(dict(model.state_dict()), expected)


def test_names_are_the_engines_own_matter():
    engine = start(solo_context(), build(Tied), settings(2, optimizer=ADAMW))
    with pytest.raises(AttributeError, match="'DeepSpeedEngine' object has no attribute 'surprise'"):
        _ = engine.surprise
    assert engine.up is engine.module.up
    assert engine.zero_reduce_bucket_size() == 500_000_000
    assert isinstance(engine.optimizer, DeepSpeedOptimizer)
    assert engine.optimizer.optimizer is engine.basic_optimizer


class Around(nn.Module):
    """Counts the forwards of a module."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.count = module, 0

    def forward(self, *args):
        self.count += 1
        return self.module(*args)


def test_what_a_script_puts_in_place_of_the_engines_own_counts():
    # Parts once kept what they were made with: forward passed by what a script had put around the module.
    engine = start(solo_context(), build(Tied), settings(1, optimizer=ADAMW))
    engine.module = around = Around(engine.module)
    engine.tput_timer = timer = NoopTimer()
    engine.is_gradient_accumulation_boundary = lambda: False
    engine.backward(engine(*batch(0, 0, 0)))
    engine.step()
    assert (around.count, engine.global_steps, engine.micro_steps) == (1, 0, 1)
    assert engine._state.reporter.tput_timer is timer
    optimizer = engine.optimizer
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.set_lr(0.5)
    assert (optimizer.get_lr(), engine.get_lr()) == (0.5, [0.5])


def test_each_getter_answers():
    engine = start(solo_context(), build(Tied), settings(3, optimizer=ADAMW))
    assert len(GETTERS) > 80
    for name in GETTERS:
        getattr(engine, name)()


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({}, 5),
        ({"zero": {"size": 3}}, 3),
        ({"zero": {"stage3_size": 4}}, 4),
        ({"zero": {"size": "auto"}}, 5),
        ({"zero": True}, 5),
    ],
)
def test_a_getter_reads_the_json(config, value):
    assert value_at(config, "zero.size", 5) == value


def test_tags_must_agree_where_asked():
    def work(context: ParallelContext):
        told = settings(1, optimizer=ADAMW, checkpoint={"tag_validation": "Fail"})
        engine = start(context, nn.Linear(2, 1), told)
        with pytest.raises(
            CheckpointError, match="`tag` must be the same .* 'a0' on rank 0 and 'a1' on rank 1"
        ):
            engine.save_checkpoint("unused", tag=f"a{context.rank}")

    on_ranks(2, work)


@pytest.mark.parametrize("folder", [None, "", 3])
def test_a_folder_must_be_one(folder):
    engine = start(solo_context(), nn.Linear(2, 1), settings(1, optimizer=ADAMW))
    for name, call in (("save_dir", engine.save_checkpoint), ("load_dir", engine.load_checkpoint)):
        with pytest.raises(CheckpointError, match=f"`{name}` must be the path of a folder"):
            call(folder)


def test_an_accumulation_that_the_script_manages():
    told = settings(1, 4, optimizer=ADAMW, managed_gradient_accumulation=False)
    engine = start(solo_context(), build(Tied), told)
    engine.backward(engine(*batch(0, 0, 0)))
    engine.step()
    assert engine.global_steps == 1


def test_a_module_is_compiled_where_asked():
    engine = start(solo_context(), nn.Linear(2, 1), settings(1, optimizer=ADAMW))
    engine.compile(backend="eager")
    assert engine.is_compiled
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with pytest.raises(ConfigError, match="`schedule` and `compiled_autograd_enabled` must be left out"):
        engine.compile(schedule=[])


def test_the_documents_examples_run():
    text = (ROOT / "docs/deepspeed/engine.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(example, names)
