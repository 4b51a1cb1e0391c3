"""Types of torch's autograd Functions, which torch leaves out, and the Function of plain activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)
_Kept = TypeVar("_Kept")

# The results of a backward: a gradient for each argument of forward, None for one that has none.
Gradients = tuple[Tensor | None, ...]


class Context(Protocol[_Kept]):
    """The context of a Function: tensors that forward leaves for backward, and in `kept` the rest."""

    kept: _Kept
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Set `saved_tensors`."""

    def set_materialize_grads(self, value: bool) -> None:
        """Say whether backward gets zeros for a result without a gradient, instead of None."""


class Differentiable(Protocol[_P, _Result_co]):
    """A `torch.autograd.Function`, as its `forward` types it."""

    @staticmethod
    def forward(ctx: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result_co:
        """Compute the result, and leave on `ctx` what backward needs."""

    @classmethod
    def apply(cls, *args: object, **kwargs: object) -> Any:
        """Run forward and record it for backward."""


_MARKS = tuple(name for name in vars(FunctionCtx) if not name.startswith("_"))
"""Methods by which a forward says what backward needs."""


def apply(function: Differentiable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
    """Run `function.apply`, typed as its `forward`; where no gradients are recorded, `forward` alone."""
    run = function.apply
    if not (torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()):
        if not torch.is_grad_enabled():
            left = SimpleNamespace(**dict.fromkeys(_MARKS, lambda *given: None))
            return function.forward(left, *args, **kwargs)
        # torch's own wrapper first looks for functorch's tensors among the arguments, for 2 microseconds.
        run = super(torch.autograd.Function, function).apply  # type: ignore[safe-super]
    result: _Result = run(*args, **kwargs)
    return result


def once_differentiable(backward: Callable[..., _Result]) -> Callable[..., _Result]:
    """Mark a backward that has no derivative, as torch's decorator of this name does.

    Its result raises RuntimeError when it is differentiated. Where gradients of gradients are not wanted,
    nothing is wrapped, which saves 3 microseconds a call.
    """
    marked = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: object, *grads: Tensor | None) -> _Result:
        return (marked if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


@dataclass(frozen=True)
class ActivationKernel:
    """The two passes of an activation of one contiguous tensor.

    Attributes:
        forward: x -> the result, and the tensor that backward needs.
        backward: that tensor and the contiguous gradient of the result -> the gradient of x.
    """

    forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor], Tensor]


class Activation(torch.autograd.Function):
    """An activation by a kernel, which saves one tensor."""

    @staticmethod
    def forward(ctx: Context[ActivationKernel], x: Tensor, kernel: ActivationKernel) -> Tensor:
        """The result."""
        y, kept = kernel.forward(x.contiguous())
        ctx.save_for_backward(kept)
        ctx.kept = kernel
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[ActivationKernel], grad: Tensor) -> Gradients:
        """The gradient of x."""
        return ctx.kept.backward(ctx.saved_tensors[0], grad.contiguous()), None
