"""AdamW and SGD by themselves; what they share with all rules is in `test_conformance.py`."""

from __future__ import annotations

import math

import torch

from megazero.config.tree.optimizer import OptimizerConfig
from megazero.optim.build import build_update_rule
from megazero.optim.elementwise import Adam, Sgd
from megazero.optim.rule import Pieces

LR, STEPS = 0.02, 20


def test_first_adam_update_is_the_learning_rate_whatever_the_gradient():
    param = torch.zeros(3)
    grad, state = torch.tensor([1e-6, -4.0, 1e6]), Adam().init_state(param)
    Adam(eps=1e-30).step(Pieces([param], [grad], [state], [0.0], 1), 0.5)
    torch.testing.assert_close(param, torch.tensor([-0.5, 0.5, -0.5]))


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
    assert math.isclose(build_update_rule(OptimizerConfig(lr=1.0)).beta2, 0.999)
