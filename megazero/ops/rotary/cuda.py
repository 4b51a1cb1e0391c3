"""Rotary position embedding by the kernel of csrc/rotary/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: float, kernels: KernelLibrary) -> Tensor:
    """x [s, b, n, d] turned by direction * angle, contiguous."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    s, b, n, d = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Queries and keys are parts of one projection: the kernel goes by their strides.
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = x.as_strided((reach if x.numel() else 0,), (1,))
    by_sample = cos.shape[1] > 1
    kernels.launch(
        "rotary",
        *(x.dtype, s, b, n, d, cos.shape[-1], memory),
        *x.stride()[:3],
        *(cos, sin, int(by_sample), direction, y),
    )
    return y


class _CudaRotary(torch.autograd.Function):
    """The rotation, which saves only the table; backward turns by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: KernelLibrary) -> Tensor:
        cos, sin = (table.float().contiguous() for table in (cos, sin))
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return _turn(x, cos, sin, 1.0, kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0, ctx.kernels), None, None, None


def apply_rotary_cuda(x: Tensor, cos: Tensor, sin: Tensor, kernels: KernelLibrary = CUDA_KERNELS) -> Tensor:
    """x [s, b, n, d] in fp32, fp16 or bf16 on a GPU, turned in fp32 by the table's angles."""
    return apply(_CudaRotary, x, cos, sin, kernels)
