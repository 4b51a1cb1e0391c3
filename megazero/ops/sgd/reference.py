"""SGD as its formulas read (momentum of Polyak 1964), with weight decay as a part of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import scaled


def sgd_move(
    param: Tensor,
    grad: Tensor,
    momentum_sum: Tensor | None,
    weights: Tensor | None,
    /,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    scale: float,
) -> None:
    """In place, with g scaled, plus weight_decay p: u = momentum u + g; p = p - lr u."""
    g = scaled(grad, scale, param.dtype)
    direction = g.add(param, alpha=weight_decay) if weight_decay else g
    if momentum_sum is not None:
        direction = momentum_sum.mul_(momentum).add_(direction)
    param.add_(direction, alpha=-lr)
    if weights is not None:
        weights.copy_(param)


@torch.no_grad()
def sgd_reference(
    param: Tensor, grad: Tensor, momentum_sum: Tensor | None, weights: Tensor | None = None, **settings: float
) -> None:
    """`sgd_move` on whole tensors."""
    sgd_move(param, grad, momentum_sum, weights, **settings)
