"""Tokens of which one is frequent: it fills segments, which are added up before its row's sum."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.embedding.cuda import SEGMENT, embedding_cuda

VOCABULARY, WIDTH, FREQUENT, OTHERS = 64, 512, 2 * SEGMENT, 72


def _case(dtype: torch.dtype, name: str) -> KernelCase:
    def run(kernels: KernelLibrary) -> None:
        others = torch.randint(1, VOCABULARY, (OTHERS,), generator=torch.Generator().manual_seed(0))
        tokens = torch.cat([torch.zeros(FREQUENT, dtype=torch.int64), others])
        weight = torch.randn(VOCABULARY, WIDTH).to(dtype).requires_grad_()
        out = embedding_cuda(tokens, weight, 0, VOCABULARY, kernels)
        out.backward(torch.randn(len(tokens), WIDTH).to(dtype))

    row, partial = WIDTH * dtype.itemsize, WIDTH * 4
    count, segments = FREQUENT + OTHERS, FREQUENT // SEGMENT
    return KernelCase(
        f"embedding {name}",
        run,
        {
            "embedding_forward": 2 * count * row + count * 8,
            "embedding_segments": FREQUENT * (row + 8) + segments * (16 + partial),
            "embedding_backward": (OTHERS + VOCABULARY) * row
            + segments * partial
            + (OTHERS + VOCABULARY + 1) * 8,
        },
    )


CASES = tuple(_case(dtype, name) for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")))
