"""The sum of squares: all elements once, and a double for each chunk of 16,384."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.square_sum.cuda import square_sum_cuda

COUNT = 6 << 14
_CHUNKS = COUNT >> 14


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        square_sum_cuda([torch.rand(COUNT).to(dtype)], torch.empty(1), kernels)

    return KernelCase(
        f"square_sum {name}",
        run,
        {"square_sums": COUNT * dtype.itemsize + 8 * _CHUNKS, "square_total": 8 * _CHUNKS + 12},
    )


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
