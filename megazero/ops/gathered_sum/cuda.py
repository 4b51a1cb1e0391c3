"""The gathered sum by the kernels of csrc/gathered_sum/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS


class _CudaGatheredSum(torch.autograd.Function):
    """The sum, which saves its inputs; backward reads each sum's gradient once and adds nothing in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        slots: Tensor,
        choice: Tensor,
        weights: Tensor | None,
        whole: bool,
        kernels: KernelLibrary,
    ) -> Tensor:
        rows, slots, choice = rows.contiguous(), slots.contiguous(), choice.contiguous()
        wide = None if weights is None else weights.float().contiguous()
        (m, h), (n, k) = rows.shape, slots.shape
        out = rows.new_empty(n, h)
        kernels.launch("gathered_sum_forward", rows.dtype, n, h, m, k, rows, slots, wide, out)
        ctx.save_for_backward(rows, slots, choice, wide)
        ctx.weights_dtype = None if weights is None else weights.dtype
        ctx.whole, ctx.kernels = whole, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        rows, slots, choice, wide = ctx.saved_tensors
        (m, h), (n, k) = rows.shape, slots.shape
        grad, grad_rows = grad.contiguous(), torch.empty_like(rows)
        grad_weights = None if wide is None else torch.empty_like(wide)
        tensors = (rows, slots, choice, wide, grad, grad_rows, grad_weights)
        ctx.kernels.launch("gathered_sum_backward", rows.dtype, n, h, m, k, int(ctx.whole), *tensors)
        grad_weights = None if grad_weights is None else grad_weights.to(ctx.weights_dtype)
        return grad_rows, None, None, grad_weights, None, None


def gathered_sum_cuda(
    rows: Tensor,
    slots: Tensor,
    choice: Tensor,
    weights: Tensor | None,
    whole: bool,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> Tensor:
    """The sum of rows [m, h] in fp32, fp16 or bf16 on a GPU; a number that no row has adds nothing."""
    return apply(_CudaGatheredSum, rows, slots, choice, weights, whole, kernels)
