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


CHANGES = {
    "kept": lambda engine: None,
    "dropped by the module": lambda engine: engine.module.zero_grad(),
    "zeros by the module": lambda engine: engine.module.zero_grad(set_to_none=False),
    "dropped by the optimizer": lambda engine: engine.optimizer.zero_grad(),
    "dropped by the engine": lambda engine: engine.zero_grad(),
    "halved": lambda engine: [p.grad.mul_(0.5) for p in engine.module.parameters()],
    "replaced": lambda engine: [
        setattr(p, "grad", p.grad.clamp(-0.05, 0.05)) for p in engine.module.parameters()
    ],
}


def changed(deepspeed, section, dtype, change, backwards):
    """The type and sum of a gradient after a backward, and the weights after it was changed and one step."""
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 2)
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **section,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    x = (torch.arange(12.0).reshape(4, 3) / 12).to(dtype)
    engine.backward(engine(x).square().mean())
    grad = model.weight.grad
    before = [str(grad.dtype), grad.float().sum().item()]
    change(engine)
    if backwards == 2:
        engine.backward(engine(x + 1).square().mean())
    engine.step()
    return [before, model.weight.grad, model.weight.detach().flatten().tolist()]


def changes(deepspeed, section, dtype):
    """Each change, before a step and before another backward."""
    return {
        f"{name}, {backwards}": changed(deepspeed, section, dtype, change, backwards)
        for name, change in CHANGES.items()
        for backwards in (1, 2)
    }


@check()
def gradients_that_a_script_changes(deepspeed, scratch):
    return changes(deepspeed, {}, torch.float32)


@check(tolerance=5e-3)
def gradients_in_bf16_that_a_script_changes(deepspeed, scratch):
    return changes(deepspeed, {"bf16": {"enabled": True}}, torch.bfloat16)


@check(tolerance=1e-3)
def gradients_in_fp16_that_a_script_changes(deepspeed, scratch):
    return changes(deepspeed, {"fp16": {"enabled": True, "loss_scale": 1.0}}, torch.float16)
