"""Restricts torch and cuBLAS to kernels that give the same bits each time, for `--deterministic-mode`.

The kernels of `megazero.ops` use no atomic additions and need nothing. On the CPU nothing changes.
"""

from __future__ import annotations

import os

import torch


def compute_deterministically() -> None:
    """Choose deterministic kernels for the rest of the process; an operator that has none raises an error.

    Call this before the first product on a GPU, since cuBLAS reads its setting once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or sums depend on timing
    torch.use_deterministic_algorithms(True)
    # Nothing reads such memory. torch sets the module's class at run time, which mypy cannot know.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
