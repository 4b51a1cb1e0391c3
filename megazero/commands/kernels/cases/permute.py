"""Two experts for each token, and as many blank rows as taken ones: the sort of the choices, and the rows."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.permute.front import permute_cuda
from megazero.ops.sort_by_expert.cuda import BLOCK, sort_by_expert_cuda

TOKENS, EACH, ROWS, WIDTH = 48, 2, 128, 1024
TAKEN = TOKENS * EACH
EXPERTS, CHOICES = 8, 4 * BLOCK


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        numbers = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:TAKEN]
        choice = torch.full((ROWS,), -1)
        choice[numbers] = torch.arange(TAKEN)
        x = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
        out = permute_cuda(x, numbers.view(TOKENS, EACH), choice, False, kernels)
        out.backward(torch.randn(ROWS, WIDTH).to(dtype))

    row, slots = WIDTH * dtype.itemsize, TAKEN * 8
    return KernelCase(
        f"permute {name}",
        run,
        {
            "permute": (TOKENS + TAKEN) * row + slots,
            "permute_clear": (ROWS - TAKEN) * row + ROWS * 8,
            "gathered_sum_forward": (TAKEN + TOKENS) * row + slots,
        },
    )


def _sort(kernels: KernelLibrary) -> None:
    chosen = torch.randint(EXPERTS, (CHOICES // EACH, EACH), generator=torch.Generator().manual_seed(0))
    sort_by_expert_cuda(chosen, None, EXPERTS, None, kernels)


# Counts of each expert and of the choices without one, for each block.
_CELLS = (EXPERTS + 1) * 4
_COUNTS = CHOICES // BLOCK * _CELLS

CASES = (
    *(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))),
    KernelCase(
        "sort_by_expert",
        _sort,
        {
            "expert_counts": CHOICES * 8 + _COUNTS,
            "expert_starts": 2 * _COUNTS + _CELLS + EXPERTS * 8,
            "expert_rows": 3 * CHOICES * 8 + _COUNTS + _CELLS,
        },
        {"expert_rows": "a warp's choices are of several experts, whose rows lie apart"},
    ),
)
