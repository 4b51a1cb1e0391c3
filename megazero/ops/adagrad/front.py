"""The public Adagrad step and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.ops.adagrad.cuda import adagrad_cuda
from megazero.ops.adagrad.reference import adagrad_move, adagrad_reference
from megazero.ops.chunks import side_by_side
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, DEVICES, FLOATS, CallFacts, Implementation, Operator, where
from megazero.ops.native import NATIVE, address, available, update_pass

_FP32 = frozenset({torch.float32})


def adagrad_native_cpu(
    param: Tensor,
    grad: Tensor,
    total: Tensor,
    weights: Tensor | None = None,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    scale: float,
) -> None:
    """The compiled kernel of csrc/adagrad: one pass, from the gradient as stored to the weights."""
    NATIVE.adagrad_step(
        update_pass(param, grad, scale, weights), address(param), address(total), lr, eps, weight_decay
    )


@torch.no_grad()
def adagrad_chunks(
    param: Tensor, grad: Tensor, total: Tensor, weights: Tensor | None = None, **settings: float
) -> None:
    """The reference chunk by chunk, so that temporaries stay small."""
    for parts in side_by_side(param, grad, total, weights):
        adagrad_move(*parts, **settings)


ADAGRAD: Operator[Callable[..., None]] = Operator(
    "adagrad",
    (
        Implementation("native_cpu", adagrad_native_cpu, where(CPU, _FP32, available)),
        Implementation("cuda", adagrad_cuda, on_cuda_kernels(_FP32)),
        Implementation("chunks", adagrad_chunks, where(frozenset(DEVICES), FLOATS)),
        Implementation("reference", adagrad_reference),
    ),
)


def adagrad_step(
    param: Tensor,
    grad: Tensor,
    total: Tensor,
    weights: Tensor | None = None,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """One step of Adagrad in place (Duchi et al. 2011).

    ``s = s + g^2``, ``p = p - lr g / (sqrt(s) + eps)``, where g includes ``wd p``.

    Args:
        param: contiguous weights; all tensors have one shape and device.
        grad: their gradient, of any width.
        total: the sum s of squared gradients, changed in place.
        weights: a tensor that also gets the new weights, rounded to its dtype; None for none.
        lr: learning rate.
        eps: added to the root.
        weight_decay: share of the weights in the gradient.
        scale: a factor that the gradient is first multiplied by.
    """
    ADAGRAD.choose(CallFacts.of(param)).fn(
        param,
        grad,
        total,
        weights,
        lr=lr,
        eps=eps,
        weight_decay=weight_decay,
        scale=scale,
    )
