"""AdamW: a step by hand, torch.optim as a second opinion, every implementation against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megazero.ops import CallFacts
from megazero.ops.adam import ADAM, adam_step

SETTINGS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((3, 5), (1,), (0,), (1031,))
ON_CPU = [each for each in ADAM.implementations if each.serves(CallFacts("cpu", torch.float32))]


def _state() -> list[list[Tensor]]:
    torch.manual_seed(0)
    params = [torch.randn(shape) for shape in SHAPES]
    return [params, *([torch.zeros_like(each) for each in params] for _ in range(2))]


def _gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) * 10 ** (step - 3) for shape in SHAPES]


def test_the_first_step_by_hand() -> None:
    """m / (1 - b1) = g and v / (1 - b2) = g^2, so the first step is lr g / (|g| + eps) after decay."""
    param, m, v = torch.tensor([2.0]), torch.zeros(1), torch.zeros(1)
    adam_step([param], [torch.tensor([0.5])], [m], [v], step=1, **SETTINGS)
    assert param.item() == pytest.approx(2.0 * (1 - 0.01 * 0.1) - 0.01, rel=1e-6)
    assert m.item() == pytest.approx(0.05)
    assert v.item() == pytest.approx(0.0125)


@pytest.mark.parametrize("implementation", ON_CPU, ids=lambda each: each.name)
def test_five_steps_equal_torch_optim(implementation) -> None:
    """Gradients grow and shrink by orders of magnitude; empty and ragged tensors included."""
    params, exp_avgs, exp_avg_sqs = _state()
    twins = [each.clone().requires_grad_() for each in params]
    optimizer = torch.optim.AdamW(twins, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for step in range(1, 6):
        grads = _gradients(step)
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad.clone()
        optimizer.step()
        implementation.fn(params, grads, exp_avgs, exp_avg_sqs, step=step, **SETTINGS)
    for ours, twin, m in zip(params, twins, exp_avgs, strict=True):
        assert torch.allclose(ours, twin, rtol=1e-5, atol=1e-6)
        if m.numel():
            assert torch.allclose(m, optimizer.state[twin]["exp_avg"], rtol=1e-5, atol=1e-6)


def test_bf16_gradients_are_widened_exactly() -> None:
    grads = [each.bfloat16() for each in _gradients(3)]
    narrow, wide = _state(), _state()
    adam_step(narrow[0], grads, *narrow[1:], step=1, **SETTINGS)
    adam_step(wide[0], [each.float() for each in grads], *wide[1:], step=1, **SETTINGS)
    for ours, theirs in zip(narrow[0], wide[0], strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_left_as_they_were() -> None:
    params, exp_avgs, exp_avg_sqs = _state()
    grads = _gradients(3)
    before = [each.clone() for each in grads]
    adam_step(params, grads, exp_avgs, exp_avg_sqs, step=1, **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


def test_a_late_step_needs_no_correction() -> None:
    """At step 10^6 both corrections are one: the update is m / (sqrt(v) + eps)."""
    param, m, v = torch.tensor([0.0]), torch.tensor([0.1]), torch.tensor([0.04])
    adam_step([param], [torch.tensor([0.1])], [m], [v], step=10**6, **SETTINGS)
    assert param.item() == pytest.approx(-0.01 * 0.1 / math.sqrt(0.95 * 0.04 + 0.05 * 0.01), rel=1e-5)


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="`step` must be at least 1, but is 0"):
        adam_step([], [], [], [], step=0, **SETTINGS)
    with pytest.raises(ValueError, match=r"as long as `params` \(1\), but have lengths 0, 1 and 1"):
        adam_step([torch.zeros(1)], [], [torch.zeros(1)], [torch.zeros(1)], step=1, **SETTINGS)
    adam_step([], [], [], [], step=1, **SETTINGS)
