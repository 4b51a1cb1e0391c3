"""Attention whole in compiled code on CPU (csrc/attention): forward, and backward from the log-sum-exp.

Matrix products, softmax, mask and dropout of a block happen while it is in the cache, in fp32 arithmetic, and
blocks beyond the causal diagonal are left out (Dao et al. 2022). Only the result and the log-sum-exp are
saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.kernel import AttentionKernel, Results
from megazero.ops.counter_random import KeepRows, keep_columns
from megazero.ops.dropout import attention_columns, attention_row_keys
from megazero.ops.native import NATIVE, address, adjacent, heads_of, kept_by


def _shape(
    q: Tensor, k: Tensor, call: AttentionCall, results: torch.dtype, **most: NATIVE.InstructionSet
) -> NATIVE.AttentionShape:
    """The kernels' description of the sizes; `most` limits the instruction set, for tests."""
    (s, b, n, d), (t, _, g, _) = q.shape, k.shape
    kinds = [x == torch.bfloat16 for x in (q.dtype, results)]
    threads = torch.get_num_threads()
    return NATIVE.AttentionShape(
        s, t, b, n, g, d, threads, call.scale, call.causal, kinds[0], kinds[1], **most
    )


@dataclass(frozen=True, eq=False)
class _Given:
    """A call as the kernels get it: its mask, and the shares of dropout's hash by row and by key."""

    call: AttentionCall
    mask: Tensor | None = None
    rows: KeepRows | None = None
    columns: Tensor | None = None

    def limits(self) -> NATIVE.AttentionLimits:
        """The kernels' description of mask and dropout; this must outlive it."""
        limits = NATIVE.AttentionLimits()
        if self.mask is not None:
            steps = (self.mask.stride(dim) if self.mask.shape[dim] > 1 else 0 for dim in range(3))
            limits.mask(self.mask.data_ptr(), *steps)
        if self.call.dropout is not None and self.rows is not None and self.columns is not None:
            step = self.columns.stride(0) if len(self.columns) > 1 else 0
            limits.dropout(kept_by(self.rows, self.columns, self.call.dropout.p), step)
        return limits


class _NativeAttention(AttentionKernel):
    def prepare(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> _Given:
        rows = columns = None
        if call.dropout is not None:
            rows = KeepRows.of(attention_row_keys(call.dropout, q.shape[2]))
            rows = KeepRows(rows.low.contiguous(), rows.odd_high.contiguous())
            columns = keep_columns(attention_columns(call.dropout)).contiguous()
        mask = call.allowed(q, k)
        return _Given(call, None if mask is None else adjacent(mask), rows, columns)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, given: _Given, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(adjacent, (q, k, v))
        s, b, n, _ = q.shape
        out = torch.empty(q.shape, dtype=dtype)
        lse = torch.empty(b, n, s, dtype=torch.float32)
        shape = _shape(q, k, given.call, dtype)
        NATIVE.attention_forward(shape, given.limits(), *map(heads_of, (q, k, v, out)), address(lse))
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, given: _Given, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, grad = map(adjacent, (q, k, v, results.out, results.grad))
        lse, grad_lse = (None if x is None else x.contiguous() for x in (results.lse, results.grad_lse))
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=dtype) for x in (q, k, v))
        shape = _shape(q, k, given.call, dtype)
        NATIVE.attention_backward(
            shape,
            given.limits(),
            *map(heads_of, (q, k, v, out)),
            address(lse),
            heads_of(grad),
            address(grad_lse),
            *map(heads_of, (grad_q, grad_k, grad_v)),
        )
        return grad_q, grad_k, grad_v


attention_native_cpu = _NativeAttention()
"""Attention and its log-sum-exp by the kernels of csrc/attention, for q [s, b, n, d] in fp32 or bf16."""
