"""The public Lion step and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.ops.chunks import side_by_side
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, DEVICES, FLOATS, CallFacts, Implementation, Operator, where
from megazero.ops.lion.cuda import lion_cuda
from megazero.ops.lion.reference import lion_move, lion_reference
from megazero.ops.native import NATIVE, address, available, update_pass

_FP32 = frozenset({torch.float32})


def lion_native_cpu(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    weights: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    scale: float,
) -> None:
    """The compiled kernel of csrc/lion: one pass, from the gradient as stored to the weights."""
    NATIVE.lion_step(
        update_pass(param, grad, scale, weights),
        address(param),
        address(exp_avg),
        beta1,
        beta2,
        lr,
        1.0 - lr * weight_decay,
    )


@torch.no_grad()
def lion_chunks(
    param: Tensor, grad: Tensor, exp_avg: Tensor, weights: Tensor | None = None, **settings: float
) -> None:
    """The reference chunk by chunk, so that temporaries stay small."""
    for parts in side_by_side(param, grad, exp_avg, weights):
        lion_move(*parts, **settings)


LION: Operator[Callable[..., None]] = Operator(
    "lion",
    (
        Implementation("native_cpu", lion_native_cpu, where(CPU, _FP32, available)),
        Implementation("cuda", lion_cuda, on_cuda_kernels(_FP32)),
        Implementation("chunks", lion_chunks, where(frozenset(DEVICES), FLOATS)),
        Implementation("reference", lion_reference),
    ),
)


def lion_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    weights: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """One step of Lion in place (Chen et al. 2023, algorithm 2).

    ``p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g)``, then ``m = b2 m + (1 - b2) g``.

    Args:
        param: contiguous weights; all tensors have one shape and device.
        grad: their gradient, of any width.
        exp_avg: the momentum m, changed in place.
        weights: a tensor that also gets the new weights, rounded to its dtype; None for none.
        lr: learning rate.
        beta1: share of m in the sum whose sign is taken.
        beta2: decay of m.
        weight_decay: decoupled weight decay.
        scale: a factor that the gradient is first multiplied by.
    """
    LION.choose(CallFacts.of(param)).fn(
        param,
        grad,
        exp_avg,
        weights,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        scale=scale,
    )
