"""RMSNorm: x, y, both gradients, the scale of each row, the weight, and partial sums of its gradient."""

from __future__ import annotations

import torch

from megazero.kernels import KernelLibrary
from megazero.kernels.on_cpu import MOST_GROUPS
from megazero.ops.rms_norm.cuda import rms_norm_cuda
from megazero.report.kernels.case import KernelCase

ROWS, WIDTH = 96, 1024


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
        weight = torch.randn(WIDTH).requires_grad_()
        rms_norm_cuda(x, weight, 1e-5, kernels).backward(torch.randn(ROWS, WIDTH).to(dtype))

    rows, weights = ROWS * WIDTH * dtype.itemsize, WIDTH * 4
    return KernelCase(
        f"rms_norm {name}",
        run,
        {
            "rms_norm_forward": 2 * rows + weights + ROWS * 4,
            "rms_norm_backward": 3 * rows + weights + ROWS * 4 + MOST_GROUPS * weights,
            "column_sum": MOST_GROUPS * weights + weights,
        },
    )


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
