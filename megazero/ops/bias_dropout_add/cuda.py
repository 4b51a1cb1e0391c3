"""residual + dropout(x + bias) by the kernels of csrc/bias_dropout_add/cuda.cu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.counter_random import keep_threshold
from megazero.ops.cuda import CUDA_KERNELS
from megazero.ops.dropout import Dropout, hidden_row_keys


class _CudaBiasDropoutAdd(torch.autograd.Function):
    """The kernels' operator; it saves only the keys of the rows, and backward makes the mask again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        row_keys: Tensor | None,
        p: float,
        kernels: KernelLibrary,
    ) -> Tensor:
        ctx.p, ctx.kernels, ctx.x_dtype = p, kernels, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(row_keys)
        # The kernels know residuals in x's dtype and in fp32.
        known = residual if residual.dtype == x.dtype else residual.float()
        known, out = known.contiguous(), torch.empty_like(known, memory_format=torch.contiguous_format)
        count, width = _rows(x)
        kernels.launch(
            "bias_dropout_add_forward",
            *(x.dtype, out.dtype, count, width, kernels.column_groups(count, width)),
            *(x.contiguous(), None if bias is None else bias.float().contiguous()),
            *(known, row_keys, keep_threshold(p), 1 / (1 - p), out),
        )
        return out.to(residual.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        (row_keys,) = ctx.saved_tensors
        known = (grad if grad.dtype == ctx.x_dtype else grad.float()).contiguous()
        grad_x, grad_bias, partials = grad, None, None
        count, width = _rows(grad)
        groups = ctx.kernels.column_groups(count, width)
        written = row_keys is not None or grad.dtype != ctx.x_dtype
        if written:
            grad_x = torch.empty_like(known, dtype=ctx.x_dtype)
        if ctx.bias_dtype is not None:
            grad_bias = known.new_empty(width, dtype=torch.float32)
            partials = known.new_empty(groups, width, dtype=torch.float32)
        if written or grad_bias is not None:
            ctx.kernels.launch(
                "bias_dropout_add_backward",
                *(ctx.x_dtype, known.dtype, count, width, groups, known, row_keys),
                *(keep_threshold(ctx.p), 1 / (1 - ctx.p), grad_x if written else None, grad_bias, partials),
            )
        return grad_x, None if grad_bias is None else grad_bias.to(ctx.bias_dtype), grad, None, None, None


def _rows(x: Tensor) -> tuple[int, int]:
    width = x.shape[-1]
    return x.numel() // width if width else 0, width


def bias_dropout_add_cuda(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    dropout: Dropout | None,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> Tensor:
    """residual + dropout(x + bias) for fp32, fp16 or bf16 x [s, b, h] on a GPU, in the residual's dtype."""
    row_keys = None if dropout is None else hidden_row_keys(dropout).contiguous()
    p = 0.0 if dropout is None else dropout.p
    return apply(_CudaBiasDropoutAdd, x, bias, residual, row_keys, p, kernels)
