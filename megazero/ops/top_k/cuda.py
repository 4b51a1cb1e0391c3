"""The choice of the highest by the kernel of csrc/top_k/cuda.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.cuda import CUDA_KERNELS

# A warp keeps a row in registers, and each of its lanes one choice.
WIDEST, MOST_CHOSEN = 1024, 32


def top_k_cuda(values: Tensor, k: int, kernels: KernelLibrary = CUDA_KERNELS) -> Tensor:
    """The choice for values [n, E] in fp32, fp16 or bf16 on a GPU, E at most 1,024 and k at most 32."""
    values = values.detach().contiguous()
    n, width = values.shape
    chosen = values.new_empty(n, k, dtype=torch.int64)
    kernels.launch("top_k", values.dtype, n, width, k, values, chosen)
    return chosen
