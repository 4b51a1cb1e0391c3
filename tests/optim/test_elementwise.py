"""AdamW and SGD by themselves; what they share with all rules is in `test_conformance.py`."""

from __future__ import annotations

import math

import torch

from megazero.config.tree.optimizer import OptimizerConfig
from megazero.ops.update import StepFacts
from megazero.optim.build import build_update_rule
from megazero.optim.elementwise import Adam, AdEMAMix, Sgd
from megazero.optim.rule import Pieces

LR, STEPS = 0.02, 20


def test_first_adam_update_is_the_learning_rate_whatever_the_gradient():
    param = torch.zeros(3)
    grad, state = torch.tensor([1e-6, -4.0, 1e6]), Adam().init_state(param)
    Adam(eps=1e-30).step(Pieces([param], [grad], [state], [0.0], 1), 0.5)
    torch.testing.assert_close(param, torch.tensor([-0.5, 0.5, -0.5]))


def test_ademamix_is_its_formula_in_fp64_over_a_training():
    """Both schedules end within it; beta3's half-life is that of beta1 before the first update."""
    rule, decay = AdEMAMix(0.9, 0.99, 1e-6, 0.999, 8.0, beta3_warmup=120, alpha_warmup=80), 0.1
    generator = torch.Generator().manual_seed(5)
    param, *grads = torch.randn(201, 23, generator=generator, dtype=torch.float64).unbind()
    wanted, fast, slow, square = param.clone(), *torch.zeros(3, 23, dtype=torch.float64).unbind()
    states = [torch.zeros(23, dtype=torch.float64) for _ in range(3)]
    for t, grad in enumerate(grads, start=1):
        alpha, share = min(t / 80, 1) * 8.0, min(t / 120, 1)
        half_life = (1 - share) * math.log(0.5, 0.9) + share * math.log(0.5, 0.999)
        beta3 = 0.5 ** (1 / half_life)
        fast, slow = 0.9 * fast + 0.1 * grad, beta3 * slow + (1 - beta3) * grad
        square = 0.99 * square + 0.01 * grad * grad
        mean, root = fast / (1 - 0.9**t) + alpha * slow, (square / (1 - 0.99**t)).sqrt()
        wanted = wanted - LR * (mean / (root + 1e-6) + decay * wanted)
        rule.move(StepFacts(t, LR, decay), param, grad, *states)
    torch.testing.assert_close(param, wanted, rtol=1e-12, atol=1e-12)


def test_ademamix_without_a_slow_moment_is_adam():
    generator = torch.Generator().manual_seed(6)
    param, *grads = torch.randn(1 + STEPS, 57, generator=generator).unbind()
    moved = []
    for rule in (Adam(), AdEMAMix(alpha=0.0)):
        ours = param.clone()
        state = rule.init_state(ours)
        for step, grad in enumerate(grads, start=1):
            rule.step(Pieces([ours], [grad], [state], [0.1], step), LR)
        moved.append(ours)
    torch.testing.assert_close(*moved, rtol=1e-6, atol=1e-7)


def test_sgd_momentum_accumulates():
    rule, param = Sgd(0.5), torch.zeros(1)
    state = rule.init_state(param)
    seen = []
    for step in (1, 2, 3):
        rule.step(Pieces([param], [torch.ones(1)], [state], [0.0], step), 1.0)
        seen.append(param.item())
    assert seen == [-1.0, -2.5, -4.25]


def test_adam_equals_torch_adamw():
    generator = torch.Generator().manual_seed(3)
    param, *grads = torch.randn(1 + STEPS, 57, generator=generator).unbind()
    twin = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([twin], lr=LR, weight_decay=0.1)
    rule, ours = Adam(), param.clone()
    state = rule.init_state(ours)
    for step, grad in enumerate(grads, start=1):
        rule.step(Pieces([ours], [grad], [state], [0.1], step), LR)
        twin.grad = grad
        optimizer.step()
    torch.testing.assert_close(ours, twin.detach(), rtol=1e-6, atol=1e-7)


def test_sgd_equals_torch_sgd():
    generator = torch.Generator().manual_seed(4)
    param, *grads = torch.randn(1 + STEPS, 57, generator=generator).unbind()
    twin = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.SGD([twin], lr=LR, momentum=0.9, weight_decay=0.1)
    rule, ours = Sgd(0.9), param.clone()
    state = rule.init_state(ours)
    for step, grad in enumerate(grads, start=1):
        rule.step(Pieces([ours], [grad], [state], [0.1], step), LR)
        twin.grad = grad
        optimizer.step()
    torch.testing.assert_close(ours, twin.detach(), rtol=1e-6, atol=1e-7)


def test_rule_of_a_configuration():
    assert build_update_rule(OptimizerConfig(lr=1.0, adam_beta2=0.95, adam_eps=1e-6)) == Adam(0.9, 0.95, 1e-6)
    assert build_update_rule(OptimizerConfig(lr=1.0, optimizer="sgd", sgd_momentum=0.0)) == Sgd(0.0)
    ademamix = OptimizerConfig(lr=1.0, optimizer="ademamix", adam_beta2=0.9, ademamix_alpha_warmup=7)
    assert build_update_rule(ademamix) == AdEMAMix(beta2=0.9, alpha_warmup=7)
    assert math.isclose(build_update_rule(OptimizerConfig(lr=1.0)).beta2, 0.999)
