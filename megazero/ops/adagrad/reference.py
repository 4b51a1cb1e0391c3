"""Adagrad as its formulas read (Duchi et al. 2011), with weight decay as a part of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import scaled


def adagrad_move(
    param: Tensor,
    grad: Tensor,
    total: Tensor,
    weights: Tensor | None,
    /,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    scale: float,
) -> None:
    """In place, with g scaled, plus weight_decay p: s = s + g^2; p = p - lr g / (sqrt(s) + eps)."""
    g = scaled(grad, scale, param.dtype)
    g = g.add(param, alpha=weight_decay) if weight_decay else g
    total.addcmul_(g, g)
    param.addcdiv_(g, total.sqrt().add_(eps), value=-lr)
    if weights is not None:
        weights.copy_(param)


@torch.no_grad()
def adagrad_reference(
    param: Tensor, grad: Tensor, total: Tensor, weights: Tensor | None = None, **settings: float
) -> None:
    """`adagrad_move` on whole tensors."""
    adagrad_move(param, grad, total, weights, **settings)
