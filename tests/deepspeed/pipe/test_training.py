"""A pipeline trains as one process does: any stages, replicas, ZeRO stage and dtype, with tied ends."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from megazero.deepspeed.pipe.specs import LayerSpec
from tests.deepspeed.pipe.models import (
    WIDTH,
    Block,
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
