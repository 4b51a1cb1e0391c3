"""The public SGD step and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.ops.chunks import side_by_side
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, DEVICES, FLOATS, CallFacts, Implementation, Operator, where
from megazero.ops.native import NATIVE, address, available, update_pass
from megazero.ops.sgd.cuda import sgd_cuda
from megazero.ops.sgd.reference import sgd_move, sgd_reference

_FP32 = frozenset({torch.float32})


def sgd_native_cpu(
    param: Tensor,
    grad: Tensor,
    momentum_sum: Tensor | None,
    weights: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    scale: float,
) -> None:
    """The compiled kernel of csrc/sgd: one pass, from the gradient as stored to the weights."""
    NATIVE.sgd_step(
        update_pass(param, grad, scale, weights),
        address(param),
        address(momentum_sum),
        lr,
        momentum,
        weight_decay,
    )


@torch.no_grad()
def sgd_chunks(
    param: Tensor, grad: Tensor, momentum_sum: Tensor | None, weights: Tensor | None = None, **settings: float
) -> None:
    """The reference chunk by chunk, so that temporaries stay small."""
    for parts in side_by_side(param, grad, momentum_sum, weights):
        sgd_move(*parts, **settings)


SGD: Operator[Callable[..., None]] = Operator(
    "sgd",
    (
        Implementation("native_cpu", sgd_native_cpu, where(CPU, _FP32, available)),
        Implementation("cuda", sgd_cuda, on_cuda_kernels(_FP32)),
        Implementation("chunks", sgd_chunks, where(frozenset(DEVICES), FLOATS)),
        Implementation("reference", sgd_reference),
    ),
)


def sgd_step(
    param: Tensor,
    grad: Tensor,
    momentum_sum: Tensor | None,
    weights: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """One step of SGD in place, with heavy-ball momentum (Polyak 1964).

    ``u = momentum u + g``, ``p = p - lr u``, where g includes ``wd p``.

    Args:
        param: contiguous weights; all tensors have one shape and device.
        grad: their gradient, of any width.
        momentum_sum: the sum u, changed in place; None without momentum.
        weights: a tensor that also gets the new weights, rounded to its dtype; None for none.
        lr: learning rate.
        momentum: decay of u.
        weight_decay: share of the weights in the gradient.
        scale: a factor that the gradient is first multiplied by.
    """
    SGD.choose(CallFacts.of(param)).fn(
        param,
        grad,
        momentum_sum,
        weights,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        scale=scale,
    )
