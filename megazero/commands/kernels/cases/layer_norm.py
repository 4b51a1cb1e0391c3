"""Layer norm: x, y, both gradients, rows' means and scales, the parameters, partial sums of their gradients.

With a residual also that, the sum, and the gradient that arrives for the sum.
"""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.kernels.on_cpu import MOST_GROUPS
from megazero.ops.layer_norm.cuda import add_layer_norm_cuda, layer_norm_cuda

ROWS, WIDTH = 160, 1024


def _plain(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
        weight, bias = torch.randn(2, WIDTH).requires_grad_()
        layer_norm_cuda(x, weight, bias, 1e-5, kernels).backward(torch.randn(ROWS, WIDTH).to(dtype))

    return KernelCase(f"layer_norm {name}", run, _must_move(dtype, 2, 3))


def _added(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        x, residual, *grads = (torch.randn(ROWS, WIDTH).to(dtype) for _ in range(4))
        weight, bias = torch.randn(2, WIDTH).requires_grad_()
        results = add_layer_norm_cuda(x.requires_grad_(), residual, weight, bias, 1e-5, kernels)
        torch.autograd.backward(results, grads)

    return KernelCase(f"add_layer_norm {name}", run, _must_move(dtype, 4, 4))


def _must_move(dtype: torch.dtype, forward: int, backward: int) -> dict[str, int]:
    """The bytes, if forward and backward move that many matrices of x's size."""
    rows, vector, statistics = ROWS * WIDTH * dtype.itemsize, WIDTH * 4, ROWS * 8
    return {
        "layer_norm_forward": forward * rows + 2 * vector + statistics,
        "layer_norm_backward": backward * rows + vector + statistics + MOST_GROUPS * 2 * vector,
        "column_sum": (MOST_GROUPS + 1) * 2 * vector,
    }


CASES = tuple(
    make(dtype, name)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
    for make in (_plain, _added)
)
