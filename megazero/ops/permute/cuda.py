"""The permutation by the kernels of csrc/permute/cuda.cu; backward is a sum of csrc/gathered_sum/cuda.cu."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.cuda import CUDA_KERNELS


class _CudaPermute(torch.autograd.Function):
    """Saves the places alone; backward adds up a token's gradients, and nothing in memory."""

    @staticmethod
    def forward(ctx, x, slots, choice, whole, kernels) -> Tensor:
        x, slots, choice = x.contiguous(), slots.contiguous(), choice.contiguous()
        (n, h), k, m = x.shape, slots.shape[1], len(choice)
        out = x.new_empty(m, h)
        sizes = (n, h * x.element_size(), m, k, int(whole))
        kernels.launch("permute", *sizes, x, slots, choice, out)
        ctx.save_for_backward(slots)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (slots,) = ctx.saved_tensors
        grad, (n, k), (m, h) = grad.contiguous(), slots.shape, grad.shape
        grad_x = grad.new_empty(n, h)
        ctx.kernels.launch("gathered_sum_forward", grad.dtype, n, h, m, k, grad, slots, None, grad_x)
        return grad_x, None, None, None, None


def permute_cuda(
    x: Tensor, slots: Tensor, choice: Tensor, whole: bool, kernels: KernelLibrary = CUDA_KERNELS
) -> Tensor:
    """For x [n, h] in fp32, fp16 or bf16 on a GPU; a number that no row has stands for none."""
    return _CudaPermute.apply(x, slots, choice, whole, kernels)
