"""The public bias + dropout + residual and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.autograd import Gradients, apply
from megazero.ops.bias_dropout_add.cuda import bias_dropout_add_cuda
from megazero.ops.bias_dropout_add.reference import bias_dropout_add_reference
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.counter_random import KeepRows, keep_columns, keep_multiplier
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import TRAINING_FLOATS, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.dropout import Dropout, hidden_row_keys
from megazero.ops.native import NATIVE, address, kept_by, on_native_cpu, rows_of


@dataclass(frozen=True)
class DropoutFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        dropout: whether there is dropout.
        mixed: whether the residual has another dtype than x.
    """

    dropout: bool
    mixed: bool


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _keep_hash(row_keys: Tensor, width: int) -> tuple[KeepRows, Tensor]:
    return KeepRows.of(row_keys), keep_columns(torch.arange(width, device=row_keys.device))


class _BiasDropoutAdd(torch.autograd.Function):
    """The operator in row chunks that stay in cache; it saves only the keys.

    Making the mask again in backward costs less than saving and reading it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, row_keys: Tensor, p: float
    ) -> Tensor:
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
    def backward(ctx: Any, grad: Tensor) -> Gradients:
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
        of_bias = None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype)
        return grad_x.view(grad.shape), of_bias, grad, None, None


class _NativeBiasDropoutAdd(torch.autograd.Function):
    """The compiled kernels of csrc/bias_dropout_add: one pass each way, which makes the mask as it goes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, row_keys: Tensor, p: float
    ) -> Tensor:
        ctx.p, ctx.x_dtype, ctx.bias_dtype = p, x.dtype, None if bias is None else bias.dtype
        x, residual = x.contiguous(), residual.contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        keep_rows, columns = _keep_hash(row_keys, x.shape[-1])
        out = torch.empty_like(x)
        tensors = map(address, (x, wide_bias, residual, out))
        NATIVE.bias_dropout_add_forward(rows_of(x, x.shape[-1]), kept_by(keep_rows, columns, p), *tensors)
        ctx.save_for_backward(row_keys)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        (row_keys,) = ctx.saved_tensors
        width = grad.shape[-1]
        own = grad.contiguous()
        keep_rows, columns = _keep_hash(row_keys, width)
        grad_x = torch.empty_like(own)
        grad_bias = None if ctx.bias_dtype is None else torch.empty(width, dtype=torch.float32)
        tensors = map(address, (own, grad_x, grad_bias))
        NATIVE.bias_dropout_add_backward(rows_of(own, width), kept_by(keep_rows, columns, ctx.p), *tensors)
        return grad_x, None if grad_bias is None else grad_bias.to(ctx.bias_dtype), grad, None, None


def bias_dropout_add_native_cpu(
    x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None
) -> Tensor:
    """residual + dropout(x + bias) for x and residual [s, b, h] of one dtype, fp32 or bf16, on CPU."""
    assert dropout is not None
    row_keys = hidden_row_keys(dropout).view(-1, 1)
    return apply(_NativeBiasDropoutAdd, x, bias, residual, row_keys, dropout.p)


def bias_dropout_add_chunked(
    x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None
) -> Tensor:
    """residual + dropout(x + bias), chunk by chunk; shapes [s, b, h]."""
    assert dropout is not None
    row_keys = hidden_row_keys(dropout).view(-1, 1)
    return apply(_BiasDropoutAdd, x, bias, residual, row_keys, dropout.p)


def bias_add_torch(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None) -> Tensor:
    """residual + x + bias by torch's own operators."""
    assert dropout is None
    return residual + (x if bias is None else x + bias)


BIAS_DROPOUT_ADD: Operator[Callable[[Tensor, Tensor | None, Tensor, Dropout | None], Tensor]] = Operator(
    "bias_dropout_add",
    (
        Implementation("cuda", bias_dropout_add_cuda, on_cuda_kernels()),
        Implementation("torch", bias_add_torch, where(dtypes=TRAINING_FLOATS, dropout=False)),
        Implementation("native_cpu", bias_dropout_add_native_cpu, on_native_cpu(dropout=True, mixed=False)),
        # The multiplier 1 / (1 - p) is fp32, so fp64 takes the reference.
        Implementation("chunked", bias_dropout_add_chunked, where(dtypes=TRAINING_FLOATS, dropout=True)),
        Implementation("reference", bias_dropout_add_reference),
    ),
    kinds_of_calls(DropoutFacts, dropout=(False, True), mixed=(False, True)),
)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None) -> Tensor:
    """residual + dropout(x + bias) for x and residual [s, b, h], bias [h] or None.

    The mask is a function of the dropout's keys and absolute positions; see `ops.dropout`. Without dropout
    this is a plain sum. Raises ValueError unless there is one key per sequence and one position per row.
    """
    if dropout is not None:
        dropout.check(*x.shape[:2])
    facts = DropoutFacts.of(x, dropout=dropout is not None, mixed=residual.dtype != x.dtype)
    return BIAS_DROPOUT_ADD.choose(facts).fn(x, bias, residual, dropout)
