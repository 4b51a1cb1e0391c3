"""RMSNorm in row chunks that stay in cache; saves the input and one number per row."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype, row_chunks


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        wide_type = compute_dtype(x.dtype)
        wide_weight = weight.to(wide_type)
        y = torch.empty_like(rows, memory_format=torch.contiguous_format)
        scale = rows.new_empty(rows.shape[0], 1, dtype=wide_type)
        for chunk in row_chunks(x, *rows.shape):
            wide = rows[chunk].to(wide_type)
            mean_square = torch.linalg.vecdot(wide, wide).unsqueeze(-1).div_(rows.shape[1])
            torch.rsqrt(mean_square.add_(eps), out=scale[chunk])
            y[chunk] = (wide * scale[chunk]).mul_(wide_weight)
        ctx.save_for_backward(rows, weight, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """With n = x * scale and g = grad * weight: dx = scale * (g - n * mean(g * n))."""
        rows, weight, scale = ctx.saved_tensors
        wide_type = scale.dtype
        wide_weight = weight.to(wide_type)
        grad_rows = grad.reshape(rows.shape)
        grad_x = torch.empty_like(rows, memory_format=torch.contiguous_format)
        grad_weight = torch.zeros_like(wide_weight)
        for chunk in row_chunks(rows, *rows.shape):
            normed = rows[chunk].to(wide_type) * scale[chunk]
            wide_grad = grad_rows[chunk].to(wide_type)
            product = wide_grad * normed
            grad_weight += product.sum(0)
            mean = (product @ wide_weight).div_(-rows.shape[1]).unsqueeze(-1)
            grad_x[chunk] = (wide_grad * wide_weight).addcmul_(normed, mean).mul_(scale[chunk])
        return grad_x.view(grad.shape), grad_weight.to(weight.dtype), None


def rms_norm_chunked(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., h], chunk by chunk."""
    return _RMSNorm.apply(x, weight, eps)
