"""The compiled CPU kernels, or None where they are not built: torch's then serve, and this is said once.

A kernel takes addresses. Here is what its callers share: a tensor's address, and its rows as it sees them.
"""

from __future__ import annotations

import warnings

import torch  # before the kernels: they use the OpenMP runtime that torch brings into the process
from torch import Tensor

try:
    from megazero.ops import _native as NATIVE
except ImportError as error:
    NATIVE = None
    warnings.warn(
        f"megazero.ops works without its compiled kernels ({error}): activations, norms and the loss are "
        "slower on CPU. Install a C++17 compiler and run `pip install -e .` to build them.",
        stacklevel=2,
    )

CPU = frozenset({"cpu"})
NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16})


def available() -> bool:
    """Whether the kernels are built."""
    return NATIVE is not None


def rows_of(x: Tensor, width: int, count: int | None = None):
    """Contiguous fp32 or bf16 `x` as rows of `width` elements, to be shared by torch's threads.

    As many as fill x, unless `count` says how many.
    """
    if count is None:
        count = x.numel() // width if width else 0
    return NATIVE.Rows(count, width, torch.get_num_threads(), x.dtype == torch.bfloat16)


def address(x: Tensor | None) -> int:
    """Where the first element lies; 0 for None."""
    return 0 if x is None else x.data_ptr()
