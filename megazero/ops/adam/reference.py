"""AdamW as its formulas read (Loshchilov & Hutter 2019; moments of Kingma & Ba 2015)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.ops.chunks import scaled


@torch.no_grad()
def adam_reference(
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
    """In place, with t = `step` counted from 1 and g widened to the moments' dtype and scaled:

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  w = w (1 - lr weight_decay);
    w = w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).
    """
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    for param, grad, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        g = scaled(grad, scale, m.dtype)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        param.mul_(1 - lr * weight_decay)
        denominator = (v.sqrt() / math.sqrt(correction2)).add_(eps)
        param.sub_((m / denominator).mul_(lr / correction1))
    if weights is not None:
        adam_publish(weights, params)


def adam_publish(weights: Sequence[Tensor | None], params: list[Tensor]) -> None:
    """Write the new weights, rounded, where the model has its own."""
    for out, param in zip(weights, params, strict=True):
        if out is not None:
            out.copy_(param)
