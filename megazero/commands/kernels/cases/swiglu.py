"""SwiGLU: gate and up, y, and the gradients of all three."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.swiglu.cuda import swiglu_cuda

ROWS, WIDTH = 96, 1024


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        gate_up = torch.randn(ROWS, 2, WIDTH).to(dtype).requires_grad_()
        swiglu_cuda(gate_up, kernels).backward(torch.randn(ROWS, WIDTH).to(dtype))

    rows = ROWS * WIDTH * dtype.itemsize
    return KernelCase(f"swiglu {name}", run, {"swiglu_forward": 3 * rows, "swiglu_backward": 5 * rows})


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
