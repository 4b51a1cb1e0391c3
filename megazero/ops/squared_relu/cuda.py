"""Squared ReLU by the kernels of csrc/squared_relu/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS


class _CudaSquaredReLU(torch.autograd.Function):
    """One pass over memory each way; saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: KernelLibrary) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        kernels.launch("squared_relu_forward", x.dtype, x.numel(), x, y)
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        (x,) = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), torch.empty_like(x)
        ctx.kernels.launch("squared_relu_backward", x.dtype, x.numel(), x, grad, grad_x)
        return grad_x, None


def squared_relu_cuda(x: Tensor, kernels: KernelLibrary = CUDA_KERNELS) -> Tensor:
    """max(x, 0)^2 for x of any shape in fp32, fp16 or bf16 on a GPU."""
    return apply(_CudaSquaredReLU, x, kernels)
