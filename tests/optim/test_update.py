"""One conformance sweep over all update rules, against formulas written out in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from megazero.config.tree import OptimizerConfig
from megazero.optim.update import Adam, Sgd, build_update_rule

RULES = [Adam(), Adam(0.8, 0.95, 1e-4), Sgd(0.9), Sgd(0.0)]
LR, STEPS = 0.02, 20


def reference(rule, param, grads, decay):
    """Twenty updates of one fp64 tensor, as the papers write them."""
    p = param.double()
    first, second = torch.zeros_like(p), torch.zeros_like(p)
    for t, grad in enumerate(grads, start=1):
        g = grad.double()
        if isinstance(rule, Adam):
            first = rule.beta1 * first + (1 - rule.beta1) * g
            second = rule.beta2 * second + (1 - rule.beta2) * g * g
            unbiased = first / (1 - rule.beta1**t)
            update = unbiased / ((second / (1 - rule.beta2**t)).sqrt() + rule.eps)
        else:
            first = rule.momentum * first + g
            update = first
        p = p - LR * decay * p - LR * update
    return p


def problem(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]
    return params, grads


def train(rule, params, grads, decays):
    params = [p.clone() for p in params]
    states = [rule.init_state(p) for p in params]
    for t, step_grads in enumerate(grads, start=1):
        rule.step(params, step_grads, states, step=t, lr=LR, weight_decays=decays)
    return params, states


@pytest.mark.parametrize("rule", RULES, ids=repr)
class TestEveryRule:
    def test_equals_its_formula(self, rule):
        params, grads = problem([(33,), (4, 5), ()])
        decays = [0.1, 0.0, 0.1]
        trained, _ = train(rule, params, grads, decays)
        for i, (param, decay) in enumerate(zip(params, decays, strict=True)):
            expected = reference(rule, param, [g[i] for g in grads], decay)
            torch.testing.assert_close(trained[i].double(), expected, rtol=2e-6, atol=2e-6)

    def test_state_is_named_zeros(self, rule):
        state = rule.init_state(torch.ones(5, 2).t())
        assert tuple(state) == rule.state_names
        for tensor in state.values():
            assert tensor.shape == (2, 5)
            assert tensor.is_contiguous()
            assert not tensor.any()

    def test_a_tensor_may_be_cut_anywhere(self, rule):
        params, grads = problem([(1001,)])
        whole, whole_states = train(rule, params, grads, [0.1])
        cuts = [1, 0, 64, 333, 603]
        pieces, piece_states = train(
            rule, list(params[0].split(cuts)), [list(g[0].split(cuts)) for g in grads], [0.1] * len(cuts)
        )
        # A kernel's vector body and its scalar tail may round the last bit differently.
        torch.testing.assert_close(torch.cat(pieces), whole[0], rtol=1e-6, atol=1e-7)
        for name in rule.state_names:
            joined = torch.cat([state[name] for state in piece_states])
            torch.testing.assert_close(joined, whole_states[0][name], rtol=1e-6, atol=1e-7)

    def test_empty_tensors_are_welcome(self, rule):
        params, grads = problem([(0,), (7,), (0, 3)])
        trained, _ = train(rule, params, grads, [0.1, 0.1, 0.0])
        alone, _ = train(rule, params[1:2], [g[1:2] for g in grads], [0.1])
        assert torch.equal(trained[1], alone[0])
        assert trained[0].shape == (0,)
        rule.step([], [], [], step=1, lr=LR, weight_decays=[])

    def test_weight_decay_is_decoupled(self, rule):
        """With zero gradients the weights shrink by (1 - lr wd) a step and the state stays zero."""
        params, _ = problem([(9,)])
        trained, states = train(rule, params, [[torch.zeros(9)]] * STEPS, [0.5])
        torch.testing.assert_close(trained[0], params[0] * (1 - LR * 0.5) ** STEPS)
        assert not any(tensor.any() for tensor in states[0].values())

    def test_zero_learning_rate_moves_nothing(self, rule):
        params, grads = problem([(9,)])
        before = params[0].clone()
        rule.step(params, grads[0], [rule.init_state(params[0])], step=1, lr=0.0, weight_decays=[0.1])
        assert torch.equal(params[0], before)

    @pytest.mark.parametrize("bad", ["param", "grad", "dtype", "shape", "lengths", "step", "state"])
    def test_unsuitable_arguments_are_refused_untouched(self, rule, bad):
        good, param = torch.ones(4, 6), torch.ones(4, 6)
        grad, state, step, decays = torch.ones(4, 6), rule.init_state(param), 1, [0.1, 0.1]
        if bad == "param":
            param, grad, state = param.t(), grad.t().contiguous(), rule.init_state(param.t())
        elif bad == "grad":
            grad = torch.ones(4, 12)[:, ::2]
        elif bad == "dtype":
            grad = grad.bfloat16()
        elif bad == "shape":
            grad = torch.ones(24)
        elif bad == "lengths":
            decays = [0.1]
        elif bad == "step":
            step = 0
        elif bad == "state":
            state = {"velocity": torch.zeros(4, 6)}
        with pytest.raises(ValueError, match=r"must be|must have"):
            rule.step(
                [good, param],
                [torch.ones(4, 6), grad],
                [rule.init_state(good), state],
                step=step,
                lr=LR,
                weight_decays=decays,
            )
        assert torch.equal(good, torch.ones(4, 6))


def test_first_adam_update_is_the_learning_rate_whatever_the_gradient():
    param = torch.zeros(3)
    Adam(eps=1e-30).step(
        [param],
        [torch.tensor([1e-6, -4.0, 1e6])],
        [Adam().init_state(param)],
        step=1,
        lr=0.5,
        weight_decays=[0.0],
    )
    torch.testing.assert_close(param, torch.tensor([-0.5, 0.5, -0.5]))


def test_sgd_momentum_accumulates():
    rule, param = Sgd(0.5), torch.zeros(1)
    state = rule.init_state(param)
    seen = []
    for step in (1, 2, 3):
        rule.step([param], [torch.ones(1)], [state], step=step, lr=1.0, weight_decays=[0.0])
        seen.append(param.item())
    assert seen == [-1.0, -2.5, -4.25]


def test_adam_equals_torch_adamw():
    params, grads = problem([(57,)], seed=3)
    trained, _ = train(Adam(), params, grads, [0.1])
    twin = torch.nn.Parameter(params[0].clone())
    optimizer = torch.optim.AdamW([twin], lr=LR, weight_decay=0.1)
    for grad in grads:
        twin.grad = grad[0]
        optimizer.step()
    torch.testing.assert_close(trained[0], twin.detach(), rtol=1e-6, atol=1e-7)


def test_rule_of_a_configuration():
    assert build_update_rule(OptimizerConfig(lr=1.0, adam_beta2=0.95, adam_eps=1e-6)) == Adam(0.9, 0.95, 1e-6)
    assert build_update_rule(OptimizerConfig(lr=1.0, optimizer="sgd", sgd_momentum=0.0)) == Sgd(0.0)
    assert math.isclose(build_update_rule(OptimizerConfig(lr=1.0)).beta2, 0.999)
