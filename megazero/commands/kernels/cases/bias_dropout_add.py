"""Bias, dropout, residual: three tensors forward, two backward, a key per row, the bias and its gradient."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.kernels.on_cpu import MOST_GROUPS
from megazero.ops.bias_dropout_add.cuda import bias_dropout_add_cuda
from megazero.ops.dropout import Dropout

POSITIONS, SAMPLES, WIDTH = 48, 2, 1024


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    shape = (POSITIONS, SAMPLES, WIDTH)

    def run(kernels: KernelLibrary) -> None:
        x, residual, grad = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
        bias = torch.randn(WIDTH).requires_grad_()
        dropout = Dropout(0.1, torch.arange(SAMPLES), range(POSITIONS))
        bias_dropout_add_cuda(x, bias, residual, dropout, kernels).backward(grad.detach())

    rows, keys, weights = POSITIONS * SAMPLES * WIDTH * dtype.itemsize, POSITIONS * SAMPLES * 8, WIDTH * 4
    return KernelCase(
        f"bias_dropout_add {name}",
        run,
        {
            "bias_dropout_add_forward": 3 * rows + keys + weights,
            "bias_dropout_add_backward": 2 * rows + keys + MOST_GROUPS * weights,
            "column_sum": MOST_GROUPS * weights + weights,
        },
    )


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
