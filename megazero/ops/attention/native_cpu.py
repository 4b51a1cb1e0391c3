"""Attention whole in compiled code on CPU (csrc/attention): forward, and backward from the log-sum-exp.

Matrix products, softmax, mask and dropout of a block happen while it is in the cache, in fp32 arithmetic, and
blocks beyond the causal diagonal are left out (Dao et al. 2022). Only the result and the log-sum-exp are
saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.attention.call import AttentionCall
from megazero.ops.autograd import Gradients, apply
from megazero.ops.counter_random import KeepRows, keep_columns
from megazero.ops.dropout import attention_columns, attention_row_keys
from megazero.ops.native import NATIVE, address, adjacent, heads_of, kept_by


def _shape(
    q: Tensor, k: Tensor, causal: bool, scale: float, **most: NATIVE.InstructionSet
) -> NATIVE.AttentionShape:
    """The kernels' description of the sizes; `most` limits the instruction set, for tests."""
    (s, b, n, d), (t, _, g, _) = q.shape, k.shape
    narrow = q.dtype == torch.bfloat16
    return NATIVE.AttentionShape(s, t, b, n, g, d, torch.get_num_threads(), scale, causal, narrow, **most)


def _limits(
    mask: Tensor | None, rows: KeepRows | None, columns: Tensor | None, p: float
) -> NATIVE.AttentionLimits:
    """The kernels' description of mask and dropout; the tensors must outlive it."""
    limits = NATIVE.AttentionLimits()
    if mask is not None:
        limits.mask(mask.data_ptr(), *(mask.stride(dim) if mask.shape[dim] > 1 else 0 for dim in range(3)))
    if rows is not None and columns is not None:
        step = columns.stride(0) if len(columns) > 1 else 0
        limits.dropout(kept_by(rows, columns, p), step)
    return limits


class _NativeAttention(torch.autograd.Function):
    """Result [s, b, n d] and log-sum-exp [b, n, s], -inf for a query that may attend to nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        low: Tensor | None,
        odd_high: Tensor | None,
        columns: Tensor | None,
        p: float,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(adjacent, (q, k, v))
        s, b, n, d = q.shape
        out = q.new_empty(s, b, n, d)
        lse = torch.empty(b, n, s, dtype=torch.float32)
        rows = None if low is None or odd_high is None else KeepRows(low, odd_high)
        limits = _limits(mask, rows, columns, p)
        shape = _shape(q, k, causal, scale)
        NATIVE.attention_forward(shape, limits, *map(heads_of, (q, k, v, out)), address(lse))
        ctx.save_for_backward(q, k, v, out, lse, mask, low, odd_high, columns)
        ctx.causal, ctx.p, ctx.scale = causal, p, scale
        ctx.set_materialize_grads(False)
        return out.view(s, b, n * d), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> Gradients:
        q, k, v, out, lse, mask, low, odd_high, columns = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else adjacent(grad.view(out.shape))
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        grads = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
        rows = None if low is None else KeepRows(low, odd_high)
        limits = _limits(mask, rows, columns, ctx.p)
        shape = _shape(q, k, ctx.causal, ctx.scale)
        given, saved = map(heads_of, (q, k, v, out)), (address(lse), heads_of(grad), address(grad_lse))
        NATIVE.attention_backward(shape, limits, *given, *saved, *map(heads_of, grads))
        return *grads, *(None,) * 7


def attention_native_cpu(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp by the kernels of csrc/attention, for q [s, b, n, d] in fp32 or bf16."""
    low = odd_high = columns = None
    p = 0.0
    if call.dropout is not None:
        rows = KeepRows.of(attention_row_keys(call.dropout, q.shape[2]))
        low, odd_high = rows.low.contiguous(), rows.odd_high.contiguous()
        columns, p = keep_columns(attention_columns(call.dropout)).contiguous(), call.dropout.p
    mask = call.allowed(q, k)
    mask = None if mask is None else adjacent(mask)
    return apply(_NativeAttention, q, k, v, mask, call.causal, low, odd_high, columns, p, call.scale)
