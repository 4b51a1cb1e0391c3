"""Two experts for each token, and as many blank rows as taken ones."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.gathered_sum.cuda import gathered_sum_cuda

TOKENS, EACH, ROWS, WIDTH = 48, 2, 128, 1024
TAKEN = TOKENS * EACH


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        numbers = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:TAKEN]
        choice = torch.full((ROWS,), -1)
        choice[numbers] = torch.arange(TAKEN)
        rows = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
        weights = torch.rand(TOKENS, EACH).requires_grad_()
        out = gathered_sum_cuda(rows, numbers.view(TOKENS, EACH), choice, weights, False, kernels)
        out.backward(torch.randn(TOKENS, WIDTH).to(dtype))

    row, slots = WIDTH * dtype.itemsize, TAKEN * (8 + 4)  # a number and a weight each
    return KernelCase(
        f"gathered_sum {name}",
        run,
        {
            "gathered_sum_forward": (TAKEN + TOKENS) * row + slots,
            "gathered_sum_backward": (TOKENS + 2 * TAKEN) * row + slots + TAKEN * 4,
            "gathered_sum_clear": (ROWS - TAKEN) * row + ROWS * 8,
        },
    )


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
