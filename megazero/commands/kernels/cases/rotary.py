"""Rotary: x and y, forward and backward, and the table of the positions."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.rotary.cuda import apply_rotary_cuda
from megazero.ops.rotary.front import rotary_table

SHAPE = (48, 2, 8, 128)  # positions, samples, heads, channels


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        x = torch.randn(SHAPE).to(dtype).requires_grad_()
        cos, sin = rotary_table(torch.arange(SHAPE[0]), SHAPE[3], 1e4)
        apply_rotary_cuda(x, cos, sin, kernels).backward(torch.randn(SHAPE).to(dtype))

    elements, table = torch.Size(SHAPE).numel(), 2 * SHAPE[0] * SHAPE[3] // 2 * 4
    return KernelCase(f"rotary {name}", run, {"rotary": 2 * (2 * elements * dtype.itemsize + table)})


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
