"""Autograd Functions run without torch's own wrappers wherever these would change nothing."""

import pytest
import torch

from megazero.ops.autograd import apply, once_differentiable

pytestmark = pytest.mark.fast


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * grad


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def test_gradients_are_those_of_torch():
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = apply(Cubed, x)
    assert isinstance(y.grad_fn, Cubed._backward_cls)
    apply(Doubled, y).sum().backward()
    assert x.grad.tolist() == [6.0, 24.0]


def test_a_gradient_of_a_gradient_is_refused():
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(apply(Cubed, x).square().sum(), x, create_graph=True)
    assert grad.tolist() == [6.0, -192.0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_transforms_of_functions_are_refused_as_torch_refuses_them():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(lambda x: apply(Doubled, x))(torch.ones(2, 3))


def test_without_gradients_the_forward_runs_alone(monkeypatch):
    monkeypatch.setattr(Cubed, "apply", None)
    x = torch.tensor([2.0], requires_grad=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = apply(Cubed, x)
        assert (y.tolist(), y.requires_grad) == ([8.0], False)
