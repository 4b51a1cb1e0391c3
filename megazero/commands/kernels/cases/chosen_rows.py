"""Rows of which half are chosen: each way, half of the rows of either side, and their numbers."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.chosen_rows.front import chosen_rows_cuda

ROWS, WIDTH = 128, 512


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        source = torch.randn(ROWS // 2, WIDTH).to(dtype).requires_grad_()
        otherwise = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[: ROWS // 2].sort().values
        numbers = torch.full((ROWS,), -1)
        numbers[rows] = torch.arange(ROWS // 2)
        out = chosen_rows_cuda(source, numbers, rows, otherwise, kernels)
        out.backward(torch.randn(ROWS, WIDTH).to(dtype))

    row = WIDTH * dtype.itemsize
    forward = 2 * ROWS * row + ROWS * 8
    # The gradient of the rest: what was chosen is not read. That of the source: its rows alone.
    of_rest, of_source = (ROWS + ROWS // 2) * row + ROWS * 8, ROWS * row + ROWS // 2 * 8
    return KernelCase(f"chosen_rows {name}", run, {"chosen_rows": forward + of_rest + of_source})


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
