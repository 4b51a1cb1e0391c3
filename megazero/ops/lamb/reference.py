"""The two passes of LAMB as their formulas read (You et al. 2020, algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import scaled


def lamb_update(p: Tensor, m: Tensor, v: Tensor, *, factor: float, eps: float, weight_decay: float) -> Tensor:
    """``u = factor m / (sqrt(v) + eps) + weight_decay p``."""
    root = v.sqrt().add_(eps)
    update = torch.div(m, root, out=root).mul_(factor)
    return update.add_(p, alpha=weight_decay) if weight_decay else update


@torch.no_grad()
def lamb_norms_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    factor: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> Tensor:
    """In place m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2; then sqrt(sum p^2, sum u^2)."""
    grad = scaled(grad, scale, exp_avg.dtype)
    exp_avg.lerp_(grad, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    update = lamb_update(param, exp_avg, exp_avg_sq, factor=factor, eps=eps, weight_decay=weight_decay)
    return torch.stack([x.double().square().sum() for x in (param, update)]).sqrt()


@torch.no_grad()
def lamb_move_reference(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: Tensor,
    weights: Tensor | None = None,
    *,
    factor: float,
    eps: float,
    weight_decay: float,
) -> None:
    """In place p = p - rate u."""
    update = lamb_update(param, exp_avg, exp_avg_sq, factor=factor, eps=eps, weight_decay=weight_decay)
    param.sub_(update.mul_(rate))
    if weights is not None:
        weights.copy_(param)
