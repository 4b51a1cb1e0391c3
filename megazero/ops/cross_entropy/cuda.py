"""The two passes over a rank's logits by the kernels of csrc/cross_entropy/cuda.cu."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import apply
from megazero.ops.cross_entropy.sliced import SlicedCrossEntropy, SlicePasses, SliceUse
from megazero.ops.cuda import CUDA_KERNELS
from megazero.ops.reduce_group import ReduceGroup


def _statistics(
    kernels: KernelLibrary, logits: Tensor, columns: int, local: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    maximum, total, picked = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))
    tensors = (logits, local, maximum, total, picked)
    kernels.launch("cross_entropy_statistics", logits.dtype, *logits.shape, columns, *tensors)
    return maximum, total, picked


def _gradient(
    kernels: KernelLibrary,
    logits: Tensor,
    columns: int,
    local: Tensor,
    normalizer: Tensor,
    grad: Tensor,
    out: Tensor,
) -> None:
    tensors = (logits, local, normalizer, grad.contiguous(), out)
    kernels.launch("cross_entropy_gradient", logits.dtype, *logits.shape, columns, *tensors)


def cuda_passes(kernels: KernelLibrary) -> SlicePasses:
    """The passes over logits in fp32, fp16 or bf16 by that library."""
    return SlicePasses(partial(_statistics, kernels), partial(_gradient, kernels))


def vocab_parallel_cross_entropy_cuda(
    logits: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    overwrite: bool = False,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> Tensor:
    """Loss of each row of fp32, fp16 or bf16 logits [..., v/tp] on a GPU; fp32 [...]."""
    how = SliceUse(cuda_passes(kernels), overwrite)
    return apply(SlicedCrossEntropy, logits, target, group, vocab_start, vocab_size, how)
