"""Lion as its formulas read (Chen et al. 2023, algorithm 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import scaled


def lion_move(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    weights: Tensor | None,
    /,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    scale: float,
) -> None:
    """With g scaled: p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g."""
    g = scaled(grad, scale, param.dtype)
    direction = torch.lerp(g, exp_avg, beta1).sign_()
    param.mul_(1.0 - lr * weight_decay).sub_(direction, alpha=lr)
    exp_avg.lerp_(g, 1.0 - beta2)
    if weights is not None:
        weights.copy_(param)


@torch.no_grad()
def lion_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, weights: Tensor | None = None, **settings: float
) -> None:
    """`lion_move` on whole tensors."""
    lion_move(param, grad, exp_avg, weights, **settings)
