"""Bias, dropout and residual in row chunks that stay in cache; saves nothing but the keys.

The mask costs less to make again in backward than to save and read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.counter_random import KeepRows, keep_columns, keep_multiplier
from megazero.ops.dropout import Dropout, hidden_row_keys


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _keep_hash(row_keys: Tensor, width: int) -> tuple[KeepRows, Tensor]:
    return KeepRows.of(row_keys), keep_columns(torch.arange(width, device=row_keys.device))


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, residual: Tensor, row_keys: Tensor, p: float):
        ctx.p, ctx.x_dtype, ctx.bias_dtype = p, x.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(row_keys)
        x_rows, residual_rows = _rows(x), _rows(residual)
        wide_type = compute_dtype(x.dtype)
        wide_bias = None if bias is None else bias.to(wide_type)
        keep_rows, columns = _keep_hash(row_keys, x.shape[-1])
        out = torch.empty_like(residual_rows, memory_format=torch.contiguous_format)
        for chunk in row_chunks(x, *x_rows.shape):
            multiplier = keep_multiplier(keep_rows[chunk], columns, p, 1 / (1 - p)).to(wide_type)
            wide = x_rows[chunk].to(wide_type)
            if wide_bias is not None:
                wide = wide + wide_bias
            out[chunk] = multiplier.mul_(wide).add_(residual_rows[chunk])
        return out.view(residual.shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (row_keys,) = ctx.saved_tensors
        grad_rows = _rows(grad)
        wide_type = compute_dtype(ctx.x_dtype)
        keep_rows, columns = _keep_hash(row_keys, grad.shape[-1])
        grad_x = torch.empty_like(grad_rows, dtype=ctx.x_dtype, memory_format=torch.contiguous_format)
        grad_bias = grad_rows.new_zeros(grad.shape[-1], dtype=wide_type)
        for chunk in row_chunks(grad, *grad_rows.shape):
            multiplier = keep_multiplier(keep_rows[chunk], columns, ctx.p, 1 / (1 - ctx.p)).to(wide_type)
            multiplier.mul_(grad_rows[chunk])
            grad_x[chunk] = multiplier
            if ctx.bias_dtype is not None:
                grad_bias += multiplier.sum(0)
        grad_bias = None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype)
        return grad_x.view(grad.shape), grad_bias, grad, None, None


def bias_dropout_add_chunked(
    x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None
) -> Tensor:
    """residual + dropout(x + bias), chunk by chunk; shapes [s, b, h]."""
    if dropout is None:
        return residual + (x if bias is None else x + bias)
    row_keys = hidden_row_keys(dropout, x.shape[0]).view(-1, 1)
    return _BiasDropoutAdd.apply(x, bias, residual, row_keys, dropout.p)
