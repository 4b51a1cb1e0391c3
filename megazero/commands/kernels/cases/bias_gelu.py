"""GELU: x, y, both gradients; with a bias also that, and partial sums of its gradient."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.kernels.on_cpu import MOST_GROUPS
from megazero.ops.bias_gelu.cuda import bias_gelu_cuda

ROWS, WIDTH = 96, 1024


def _case(dtype: torch.dtype, name: str, biased: bool) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
        bias = torch.randn(WIDTH).to(dtype).requires_grad_() if biased else None
        bias_gelu_cuda(x, bias, False, kernels).backward(torch.randn(ROWS, WIDTH).to(dtype))

    rows, vector = ROWS * WIDTH * dtype.itemsize, WIDTH * 4 if biased else 0
    must_move = {
        "bias_gelu_forward": 2 * rows + vector,
        "bias_gelu_backward": 3 * rows + vector + MOST_GROUPS * vector,
    }
    sums = {"column_sum": MOST_GROUPS * vector + vector} if biased else {}
    return KernelCase(f"{'bias_gelu' if biased else 'gelu'} {name}", run, must_move | sums)


CASES = tuple(
    _case(dtype, name, biased)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
    for biased in (True, False)
)
