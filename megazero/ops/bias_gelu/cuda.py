"""GELU of x + bias by the kernels of csrc/bias_gelu/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS


class _CudaBiasGELU(torch.autograd.Function):
    """One pass over memory each way; the bias's gradient is added up in fp32, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, exact: bool, kernels: KernelLibrary) -> Tensor:
        x = x.contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        y, width = torch.empty_like(x), x.shape[-1]
        count = x.numel() // width if width else 0
        kernels.launch("bias_gelu_forward", x.dtype, int(exact), count, width, x, wide_bias, y)
        ctx.save_for_backward(x, wide_bias)
        ctx.exact, ctx.kernels = exact, kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, bias = ctx.saved_tensors
        grad, grad_x, width = grad.contiguous(), torch.empty_like(x), x.shape[-1]
        count = x.numel() // width if width else 0
        groups, grad_bias, partials = 0, None, None
        if bias is not None:
            groups = ctx.kernels.column_groups(count, width)
            grad_bias, partials = torch.empty_like(bias), bias.new_empty(groups, width)
        tensors = (x, bias, grad, grad_x, grad_bias, partials)
        ctx.kernels.launch("bias_gelu_backward", x.dtype, int(ctx.exact), count, width, groups, *tensors)
        return grad_x, None if grad_bias is None else grad_bias.to(x.dtype), None, None


def bias_gelu_cuda(
    x: Tensor, bias: Tensor | None, exact: bool, kernels: KernelLibrary = CUDA_KERNELS
) -> Tensor:
    """gelu(x + bias) on a GPU for x [..., f] and bias [f] of one dtype: fp32, fp16 or bf16."""
    return apply(_CudaBiasGELU, x, bias, exact, kernels)
