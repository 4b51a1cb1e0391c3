"""The public AdamW step and its table of implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megazero.ops.adam.cuda import adam_cuda
from megazero.ops.adam.reference import adam_publish, adam_reference
from megazero.ops.chunks import scaled, side_by_side
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, DEVICES, FLOATS, CallFacts, Implementation, Operator, where
from megazero.ops.native import NATIVE, address, available, update_pass

_DEVICES = frozenset(DEVICES)
_FP32 = frozenset({torch.float32})


def _fused_is_built() -> bool:
    return hasattr(torch, "_fused_adamw_")


def adam_native_cpu(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: Sequence[Tensor | None] | None = None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """The compiled kernel of csrc/adam: one pass over memory, from gradients as stored to the weights."""
    root = math.sqrt(1 - beta2**step)
    rate, eps, decay = lr * root / (1 - beta1**step), eps * root, 1 - lr * weight_decay
    outs = [None] * len(params) if weights is None else weights
    for param, grad, m, v, out in zip(params, grads, exp_avgs, exp_avg_sqs, outs, strict=True):
        addresses = map(address, (param, m, v))
        NATIVE.adam_step(update_pass(param, grad, scale, out), *addresses, beta1, beta2, rate, eps, decay)


@torch.no_grad()
def adam_fused(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: Sequence[Tensor | None] | None = None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """torch's kernel, which needs one dtype throughout: other gradients are widened chunk by chunk."""
    counter = torch.full((), float(step), dtype=torch.float32, device=params[0].device)

    def move(
        params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor]
    ) -> None:
        torch._fused_adamw_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [counter] * len(params),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )

    if scale == 1.0 and all(grad.dtype == param.dtype for grad, param in zip(grads, params, strict=True)):
        move(params, grads, exp_avgs, exp_avg_sqs)
    else:
        for pieces in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            for p, g, m, v in side_by_side(*pieces):
                move([p], [scaled(g, scale, p.dtype)], [m], [v])
    if weights is not None:
        adam_publish(weights, params)


@torch.no_grad()
def adam_foreach(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: Sequence[Tensor | None] | None = None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """The reference, with each line applied to all tensors at once."""
    grads = [scaled(grad, scale, m.dtype) for grad, m in zip(grads, exp_avgs, strict=True)]
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr / (1 - beta1**step))
    if weights is not None:
        adam_publish(weights, params)


ADAM: Operator[Callable[..., None]] = Operator(
    "adam",
    (
        Implementation("native_cpu", adam_native_cpu, where(CPU, _FP32, available)),
        Implementation("cuda", adam_cuda, on_cuda_kernels(_FP32)),
        Implementation("torch_fused", adam_fused, where(_DEVICES, FLOATS, _fused_is_built)),
        Implementation("foreach", adam_foreach, where(_DEVICES, FLOATS)),
        Implementation("reference", adam_reference),
    ),
)


def adam_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: Sequence[Tensor | None] | None = None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """One AdamW step in place on params and both moments; `step` counts from 1.

    The lists hold contiguous tensors of matching shapes, on one device. Parameters and moments share one
    dtype (fp32 masters); gradients may be narrower and are widened, then multiplied by `scale`. Where
    `weights` has a tensor, the new weights are also written there, rounded to its dtype. Raises ValueError
    for lists of unequal length or a step below 1.
    """
    if not len(params) == len(grads) == len(exp_avgs) == len(exp_avg_sqs):
        raise ValueError(
            "`grads`, `exp_avgs` and `exp_avg_sqs` must be as long as `params` "
            f"({len(params)}), but have lengths {len(grads)}, {len(exp_avgs)} and {len(exp_avg_sqs)}; "
            "pass one of each per parameter."
        )
    if weights is not None and len(weights) != len(params):
        raise ValueError(
            f"`weights` must be as long as `params` ({len(params)}), but has length {len(weights)}; pass a "
            "tensor or None per parameter."
        )
    if step < 1:
        raise ValueError(f"`step` must be at least 1, but is {step}; count the first step as 1.")
    if not params:
        return
    ADAM.choose(CallFacts.of(params[0])).fn(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        weights,
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        scale=scale,
    )
