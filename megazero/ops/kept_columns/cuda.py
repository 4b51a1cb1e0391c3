"""The choice of tokens by the kernel of csrc/kept_columns/cuda.cu."""

from __future__ import annotations

from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.cuda import CUDA_KERNELS
from megazero.ops.kept_columns.reference import token_bits

# Beyond it, a block would take longer than a sort by the whole device.
LONGEST = 1 << 16


def kept_columns_cuda(keys: Tensor, length: int, kept: int, kernels: KernelLibrary = CUDA_KERNELS) -> Tensor:
    """The choice for sequences of at most 65,536 tokens on a GPU, in one launch."""
    keys = keys.contiguous()
    columns = keys.new_empty(len(keys), kept)
    kernels.launch("kept_columns", len(keys), length, kept, token_bits(length), keys, columns)
    return columns.t()
