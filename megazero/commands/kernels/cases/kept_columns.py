"""Random-LTD's choice of tokens: a key for each sample in, the kept tokens out."""

from __future__ import annotations

import torch

from megazero.commands.kernels.case import KernelCase
from megazero.kernels import KernelLibrary
from megazero.ops.kept_columns.cuda import kept_columns_cuda

SAMPLES, LENGTH, KEPT = 4, 1024, 512


def _run(kernels: KernelLibrary) -> None:
    kept_columns_cuda(torch.arange(SAMPLES), LENGTH, KEPT, kernels)


CASES = (
    KernelCase(
        "kept_columns",
        _run,
        {"kept_columns": SAMPLES * 8 + SAMPLES * KEPT * 8},
        {"kept_columns": "where a warp's tokens go depends on how many are kept before them"},
    ),
)
