"""The sum of squares by the kernels of csrc/square_sum/cuda.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.cuda import CUDA_KERNELS
from megazero.ops.segments import lengths_of

_CHUNK = 1 << 14  # elements per partial sum; a multiple of 8


@torch.no_grad()
def square_sum_cuda(
    tensors: Sequence[Tensor], overflow: Tensor | None = None, kernels: KernelLibrary = CUDA_KERNELS
) -> Tensor:
    """The sum in one pass over all tensors, in fp64 and in a fixed order.

    Args:
        tensors: tensors of one dtype: fp32, fp16 or bf16.
        overflow: fp32, one element: becomes 1 if an element is inf or NaN, otherwise 0.
        kernels: the library.
    """
    tensors = [tensor.contiguous() for tensor in tensors]
    lengths = lengths_of(tensors)
    partials = tensors[0].new_empty(sum(n // _CHUNK + 2 for n in lengths), dtype=torch.float64)
    total = tensors[0].new_empty((), dtype=torch.float64)
    sizes = (len(tensors), _CHUNK, lengths)
    kernels.launch("square_sum", tensors[0].dtype, *sizes, tensors, partials, total, overflow)
    return total
