"""The public AdamW step and its table of implementations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megazero.ops.adam.cuda import adam_cuda
from megazero.ops.adam.reference import adam_reference
from megazero.ops.cuda import cuda_built
from megazero.ops.dispatch import CUDA, DEVICES, FLOATS, CallFacts, Implementation, Operator, where

_DEVICES = frozenset(DEVICES)
_FP32 = frozenset({torch.float32})


def _fused_is_built() -> bool:
    return hasattr(torch, "_fused_adamw_")


@torch.no_grad()
def adam_fused(params, grads, exp_avgs, exp_avg_sqs, *, step, lr, beta1, beta2, eps, weight_decay) -> None:
    """torch's one-pass kernel, which needs one dtype throughout."""
    device = params[0].device
    counter = torch.full((), float(step), dtype=torch.float32, device=device)
    torch._fused_adamw_(
        params,
        [grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)],
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


@torch.no_grad()
def adam_foreach(params, grads, exp_avgs, exp_avg_sqs, *, step, lr, beta1, beta2, eps, weight_decay) -> None:
    """The reference, with each line applied to all tensors at once."""
    grads = [grad.to(m.dtype) for grad, m in zip(grads, exp_avgs, strict=True)]
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr / (1 - beta1**step))


ADAM = Operator(
    "adam",
    (
        Implementation("cuda", adam_cuda, where(CUDA, _FP32, cuda_built)),
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
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place on params and both moments; `step` counts from 1.

    The lists hold tensors of matching shapes, on one device. Parameters and moments share one dtype
    (fp32 masters); gradients may be narrower and are widened. Raises ValueError for lists of unequal
    length or a step below 1.
    """
    if not len(params) == len(grads) == len(exp_avgs) == len(exp_avg_sqs):
        raise ValueError(
            "`grads`, `exp_avgs` and `exp_avg_sqs` must be as long as `params` "
            f"({len(params)}), but have lengths {len(grads)}, {len(exp_avgs)} and {len(exp_avg_sqs)}; "
            "pass one of each per parameter."
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
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
    )
