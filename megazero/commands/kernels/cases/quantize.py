"""Quantization of bf16, stochastic: x, and packed rows of one fp32 scale per 256 elements and the codes."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.quantize import CODE_FORMATS, Quantization
from megazero.ops.quantize.cuda import dequantize_cuda, quantize_cuda

ROWS, WIDTH = 12, 8192


def _case(kind: str) -> KernelCase:
    how = Quantization(kind)

    def run(kernels: KernelLibrary) -> None:
        packed = quantize_cuda(torch.randn(ROWS, WIDTH).bfloat16(), how, 1, kernels=kernels)
        dequantize_cuda(packed, WIDTH, how, torch.bfloat16, kernels)

    moved = ROWS * (how.row_bytes(WIDTH) + 2 * WIDTH)
    return KernelCase(f"quantize {kind}", run, {"quantize": moved, "dequantize": moved})


CASES = tuple(map(_case, CODE_FORMATS))
