"""Cross-entropy: logits are read once forward, read and overwritten once backward; some numbers per row."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.mpu import SoloGroup
from megazero.ops.cross_entropy.cuda import vocab_parallel_cross_entropy_cuda

ROWS, WIDTH = 8, 16384


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        logits = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_() * 1
        target = torch.randint(WIDTH, (ROWS,))
        loss = vocab_parallel_cross_entropy_cuda(logits, target, SoloGroup(), 0, WIDTH, True, kernels)
        loss.sum().backward()

    rows = ROWS * WIDTH * dtype.itemsize
    return KernelCase(
        f"cross_entropy {name}",
        run,
        {
            "cross_entropy_statistics": rows + ROWS * (8 + 3 * 4),
            "cross_entropy_gradient": 2 * rows + ROWS * (8 + 2 * 4),
        },
    )


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
