"""A router's choice: the scores of a token's experts, and the numbers of the chosen ones."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.top_k.cuda import top_k_cuda

TOKENS, EXPERTS, CHOSEN = 256, 128, 8


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        top_k_cuda(torch.randn(TOKENS, EXPERTS).to(dtype), CHOSEN, kernels)

    return KernelCase(
        f"top_k {name}", run, {"top_k": TOKENS * EXPERTS * dtype.itemsize + TOKENS * CHOSEN * 8}
    )


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
