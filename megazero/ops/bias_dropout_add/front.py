"""The public bias + dropout + residual and its table of implementations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.bias_dropout_add.cuda import bias_dropout_add_cuda
from megazero.ops.bias_dropout_add.reference import bias_dropout_add_reference
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.counter_random import KeepRows, keep_columns, keep_multiplier
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import TRAINING_FLOATS, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.dropout import Dropout, hidden_row_keys


@dataclass(frozen=True)
class DropoutFacts(CallFacts):
    """Attributes:
    dropout: whether there is dropout.
    """

    dropout: bool


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _keep_hash(row_keys: Tensor, width: int) -> tuple[KeepRows, Tensor]:
    return KeepRows.of(row_keys), keep_columns(torch.arange(width, device=row_keys.device))


class _BiasDropoutAdd(torch.autograd.Function):
    """Works in row chunks that stay in cache, and saves only the keys.

    Making the mask again in backward costs less than saving and reading it.
    """

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
    row_keys = hidden_row_keys(dropout).view(-1, 1)
    return _BiasDropoutAdd.apply(x, bias, residual, row_keys, dropout.p)


def bias_add_torch(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None) -> Tensor:
    """residual + x + bias by torch's own operators."""
    assert dropout is None
    return residual + (x if bias is None else x + bias)


BIAS_DROPOUT_ADD = Operator(
    "bias_dropout_add",
    (
        Implementation("cuda", bias_dropout_add_cuda, on_cuda_kernels()),
        Implementation("torch", bias_add_torch, where(dtypes=TRAINING_FLOATS, dropout=False)),
        # The multiplier 1 / (1 - p) is fp32, so fp64 takes the reference.
        Implementation("chunked", bias_dropout_add_chunked, where(dtypes=TRAINING_FLOATS, dropout=True)),
        Implementation("reference", bias_dropout_add_reference),
    ),
    kinds_of_calls(DropoutFacts, dropout=(False, True)),
)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None) -> Tensor:
    """residual + dropout(x + bias) for x and residual [s, b, h], bias [h] or None.

    The mask is a function of the dropout's keys and absolute positions; see `ops.dropout`. Without dropout
    this is a plain sum. Raises ValueError unless there is one key per sequence and one position per row.
    """
    if dropout is not None:
        dropout.check(*x.shape[:2])
    return BIAS_DROPOUT_ADD.choose(DropoutFacts.of(x, dropout=dropout is not None)).fn(
        x, bias, residual, dropout
    )
