"""The plain training loop."""

from __future__ import annotations

import torch

from tests.deepspeed.checks import check


def losses(deepspeed, config, steps=3):
    """The losses of a small model."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    x = torch.arange(20.0).reshape(4, 5) / 10
    found = []
    for _ in range(steps):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


@check()
def three_steps_of_adam(deepspeed, scratch):
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    return losses(deepspeed, config)


@check(ranks=2)
def three_steps_of_adam_on_two_ranks(deepspeed, scratch):
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }
    return losses(deepspeed, config)
