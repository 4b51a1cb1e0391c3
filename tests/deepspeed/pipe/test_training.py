"""A pipeline trains as one process does: any stages, replicas, ZeRO stage and dtype, with tied ends."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from megazero.deepspeed.pipe.specs import LayerSpec, TiedLayerSpec
from tests.deepspeed.pipe.models import (
    engine_of,
    fill,
    gpt,
    head,
    item,
    loss_fn,
    on_stages,
    settings,
    train,
)

CLIP = 0.5
LAYOUTS = [(1, 1), (2, 1), (4, 1), (2, 2)]


@functools.cache
def plain(
    replicas: int, accumulation: int = 3, steps: int = 4
) -> tuple[list[float], list[float], dict[str, Any]]:
    """The same training in plain torch."""
    embed, *blocks, _ = (spec.build() for spec in gpt())
    model = nn.Module()
    for number, block in enumerate(blocks, 1):
        model.add_module(str(number), block)
    model.tied_modules = nn.ModuleDict({"embed": embed})
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            for replica in range(replicas):
                inputs, labels = item(step, micro, replica)
                x = embed(inputs)
                for block in blocks:
                    x = block(x)
                loss = loss_fn(head(embed, x), labels) / (accumulation * replicas)
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("stages", "replicas"), LAYOUTS)
def test_a_pipeline_is_one_process(stages, replicas, zero):
    def work(context):
        engine = engine_of(context, settings(zero))
        return (*train(engine), engine.module_state_dict())

    losses, norms, weights = plain(replicas)
    for mine in on_stages(stages, replicas, work):
        torch.testing.assert_close(mine[0], losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine[1], norms, rtol=1e-5, atol=1e-6)
        assert mine[2].keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(
                mine[2][name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_one_process(dtype, zero):
    config = settings(zero, **{dtype: {"enabled": True}})
    expected = on_stages(1, 1, lambda context: train(engine_of(context, config)))[0]
    for losses, norms in on_stages(4, 1, lambda context: train(engine_of(context, config))):
        assert losses == pytest.approx(expected[0], rel=2e-3)
        assert norms == pytest.approx(expected[1], rel=2e-2)
        assert losses == pytest.approx(plain(1)[0], rel=2e-2)


def test_an_overflow_on_one_stage_skips_the_step_on_all():
    config = settings(1, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})

    def work(context):
        engine = engine_of(context, config)
        before = engine.module_state_dict()
        train(engine, steps=1)
        after = engine.module_state_dict()
        same = all(torch.equal(after[name], value) for name, value in before.items())
        return engine.skipped_steps, engine.optimizer.cur_scale, same

    assert on_stages(2, 1, work) == [(1, 2.0**23, True)] * 2


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_recomputation_changes_nothing(interval):
    def work(context):
        return train(engine_of(context, settings(3), activation_checkpoint_interval=interval))

    for losses, norms in on_stages(2, 1, work):
        torch.testing.assert_close(losses, plain(1)[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norms, plain(1)[1], rtol=1e-5, atol=1e-6)


class Scale(nn.Module):
    """One weight, in a form that three layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.weight + self.shift


def mean_square(output, labels):
    return (output - labels).square().mean()


def rows(step: int):
    x = torch.sin(torch.arange(8.0).reshape(2, 4) + step)
    return x, torch.cos(x)


@pytest.mark.parametrize("zero", [0, 3])
def test_weights_may_be_tied_by_several_keys_over_any_stages(zero):
    def layers():
        def tied(key):
            return TiedLayerSpec(key, Scale, tied_weight_attr=["weight"])

        return [
            tied("a"),
            LayerSpec(nn.Linear, 4, 4),
            tied("b"),
            tied("a"),
            torch.tanh,
            tied("b"),
            tied("a"),
            nn.Linear(4, 4),
        ]

    def work(context):
        engine = engine_of(context, settings(zero, 2), layers(), loss_fn=mean_square)
        data = map(rows, range(100))
        return [float(engine.train_batch(data)) for _ in range(5)], engine.module_state_dict()

    expected, weights = on_stages(1, 1, work)[0]
    for losses, found in on_stages(4, 1, work):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_all_weights_of_a_tied_module_stay_equal_on_its_stages():
    def work(context):
        layers = [TiedLayerSpec("a", Scale), nn.Tanh(), nn.Linear(4, 4), TiedLayerSpec("a", Scale)]
        engine = engine_of(context, settings(2, 1), layers, loss_fn=mean_square)
        for step in range(4):
            engine.train_batch(iter([rows(step)]))
        return [param.detach().clone() for param in engine.module.tied_modules["a"].parameters()]

    first, last = on_stages(2, 1, work)
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    assert not torch.equal(first[1], torch.zeros(4))


def test_a_frozen_stage_and_one_that_passes_no_gradient_on():
    def layers():
        frozen = nn.Linear(4, 4).requires_grad_(False)
        return [frozen, torch.tanh, nn.Linear(4, 4), torch.Tensor.detach, nn.Linear(4, 4), nn.Linear(4, 4)]

    def work(context):
        engine = engine_of(context, settings(0, 2), layers(), loss_fn=mean_square)
        data = map(rows, range(100))
        return [float(engine.train_batch(data)) for _ in range(4)]

    expected = on_stages(1, 1, work)[0]
    for stages in (2, 3):
        for losses in on_stages(stages, 1, work):
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_stages_without_layers_or_without_parameters():
    def work(context):
        engine = engine_of(context, settings(1, 2), [nn.Linear(4, 4), torch.tanh], loss_fn=mean_square)
        data = map(rows, range(100))
        return [float(engine.train_batch(data)) for _ in range(3)]

    expected = on_stages(1, 1, work)[0]
    for losses in on_stages(4, 1, work):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
