"""RMSNorm: x, y, both gradients, the scale of each row, the weight, and partial sums of its gradient.

With a residual also that, the sum, and the gradient that arrives for the sum.
"""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.kernels.on_cpu import MOST_GROUPS
from megazero.ops.rms_norm.cuda import add_rms_norm_cuda, rms_norm_cuda

ROWS, WIDTH = 96, 1024


def _plain(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
        weight = torch.randn(WIDTH).requires_grad_()
        rms_norm_cuda(x, weight, 1e-5, kernels).backward(torch.randn(ROWS, WIDTH).to(dtype))

    return KernelCase(f"rms_norm {name}", run, _must_move(dtype, 2, 3))


def _added(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        x, residual, *grads = (torch.randn(ROWS, WIDTH).to(dtype) for _ in range(4))
        weight = torch.randn(WIDTH).requires_grad_()
        results = add_rms_norm_cuda(x.requires_grad_(), residual, weight, 1e-5, kernels)
        torch.autograd.backward(results, grads)

    return KernelCase(f"add_rms_norm {name}", run, _must_move(dtype, 4, 4))


def _must_move(dtype: torch.dtype, forward: int, backward: int) -> dict[str, int]:
    """The bytes, if forward and backward move that many matrices of x's size."""
    rows, weights = ROWS * WIDTH * dtype.itemsize, WIDTH * 4
    return {
        "rms_norm_forward": forward * rows + weights + ROWS * 4,
        "rms_norm_backward": backward * rows + weights + ROWS * 4 + MOST_GROUPS * weights,
        "column_sum": MOST_GROUPS * weights + weights,
    }


CASES = tuple(
    make(dtype, name)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
    for make in (_plain, _added)
)
