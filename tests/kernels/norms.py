"""What the sweeps of both norms share: their inputs and calls."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.harness import in_every_order

EPS = 1e-5
# Fewer than for RMSNorm: the row frame is the same, so of remainders only some are repeated.
WIDTHS = (1, 2, 3, 5, 7, 8, 12, 16, 31, 32, 33, 40, 63, 65, 128, 255, 256, 257, 264, 513, 1024, 1025, 2056)


def inputs(rows: int, width: int, dtype: torch.dtype, seed: int = 0, offset: float = 0.0) -> list[Tensor]:
    """x and residual around `offset`, and the gradients of the norm and of the sum: [rows, width] each."""
    generator = torch.Generator().manual_seed(seed)
    four = [torch.randn(rows, width, generator=generator) for _ in range(4)]
    four[0] += offset
    return [each.to(dtype) for each in four]


def vectors(count: int, width: int) -> list[Tensor]:
    """fp32 parameters [width]."""
    generator = torch.Generator().manual_seed(width)
    return [torch.randn(width, generator=generator) for _ in range(count)]


def run_plain(norm, x: Tensor, parameters: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    """y and all gradients, by the watched kernels."""

    def run(kernels):
        leaf, *own = (each.detach().requires_grad_() for each in (x, *parameters))
        y = norm(leaf, *own, EPS, kernels)
        return y, *torch.autograd.grad(y, (leaf, *own), grad)

    return in_every_order(run)


def run_added(norm, x, residual, parameters, grads: tuple[Tensor | None, Tensor | None]) -> list[Tensor]:
    """y, the sum and all gradients, by the watched kernels; of `grads`, one that is None does not arrive."""

    def run(kernels):
        a, b, *own = (each.detach().requires_grad_() for each in (x, residual, *parameters))
        outs = norm(a, b, *own, EPS, kernels)
        arriving = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None]
        wanted, given = zip(*arriving, strict=True)
        return *outs, *torch.autograd.grad(wanted, (a, b, *own), given)

    return in_every_order(run)
