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


def cast(deepspeed, stage, outside=False, **section):
    """The losses with `torch_autocast`, within a context of the script's own or not, and two dtypes."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    if section:
        config["torch_autocast"] = {"enabled": True, **section}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    x = torch.arange(20.0).reshape(4, 5) / 10
    found = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            out = engine(x)
        engine.backward(loss := out.float().square().mean())
        engine.step()
        found.append(float(loss))
    return [found, str(out.dtype), str(next(model.parameters()).dtype)]


@check(tolerance=1e-5)
def products_in_16_bits_of_weights_in_fp32(deepspeed, scratch):
    named = {"dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    return [
        cast(deepspeed, 0, dtype="bf16"),
        cast(deepspeed, 2, dtype="bfloat16"),
        cast(deepspeed, 3, **named),
    ]


@check(tolerance=1e-5)
def a_section_counts_more_than_a_context_around(deepspeed, scratch):
    return cast(deepspeed, 1, outside=True, dtype="bfloat16")
