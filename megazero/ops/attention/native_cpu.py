"""Fused attention in compiled code on CPU (csrc/attention): forward, and backward from the log-sum-exp.

Matrix products, softmax, mask and dropout of a block happen while it is in the cache, in fp32 arithmetic
(Dao et al. 2022). Blocks that no query may see, by place, document or layout, are left out. Only the result
and the log-sum-exp are saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall, Slopes, over_pairs
from megazero.ops.attention.kernel import AttentionKernel, Results, strides
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
    return NATIVE.AttentionShape(s, t, b, n, g, d, threads, call.scale, kinds[0], kinds[1], **most)


@dataclass(frozen=True, eq=False)
class _Given:
    """A call as the kernels get it: `limits` has the addresses of the tensors in `held`."""

    call: AttentionCall
    limits: NATIVE.AttentionLimits
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, call: AttentionCall) -> _Given:
        (s, _, n, _), t, limits, pattern = q.shape, k.shape[0], NATIVE.AttentionLimits(), call.pattern
        held: list[Tensor] = []

        def hold(x: Tensor, dtype: torch.dtype = torch.bool) -> Tensor:
            held.append(x.to(dtype).contiguous())
            return held[-1]

        (queries, keys), documents = call.places(s, t), call.documents
        limits.places(queries.start, keys.start, *call.sides, pattern.prefix)
        if pattern.sinks and call.sides[0] >= 0:
            places = torch.arange(keys.start, keys.stop)
            begins = call.begins
            sinks = hold((places if begins is None else places - begins) < pattern.sinks)
            limits.sinks(address(sinks), t if sinks.dim() == 2 else 0)
        if documents is not None:
            ids = call.query_ids(s), documents.ids
            limits.documents(*(address(hold(x, torch.int64)) for x in ids))
        if pattern.layout is not None:
            blocks = hold(pattern.layout.blocks)
            head, row = strides(blocks, 2)
            limits.blocks(address(blocks), head, row, pattern.layout.size)
        if isinstance(call.bias, Slopes):
            limits.slopes(address(hold(call.bias.by_head, torch.float32)))
        if call.mask is not None:
            mask = adjacent(over_pairs(call.mask, s, t))
            held.append(mask)
            limits.mask(address(mask), *strides(mask, 3))
        if call.dropout is not None:
            rows = KeepRows.of(attention_row_keys(call.dropout, n))
            rows = KeepRows(*(hold(x, torch.int32) for x in (rows.low, rows.odd_high)))
            columns = hold(keep_columns(attention_columns(call.dropout)), torch.int32)
            limits.dropout(kept_by(rows, columns, call.dropout.p), *strides(columns, 1))
        return cls(call, limits, tuple(held))


class _NativeAttention(AttentionKernel):
    def prepare(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> _Given:
        return _Given.of(q, k, call)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, given: _Given, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(adjacent, (q, k, v))
        s, b, n, _ = q.shape
        out = torch.empty(q.shape, dtype=dtype)
        lse = torch.empty(b, n, s, dtype=torch.float32)
        shape = _shape(q, k, given.call, dtype)
        NATIVE.attention_forward(shape, given.limits, *map(heads_of, (q, k, v, out)), address(lse))
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
            given.limits,
            *map(heads_of, (q, k, v, out)),
            address(lse),
            heads_of(grad),
            address(grad_lse),
            *map(heads_of, (grad_q, grad_k, grad_v)),
        )
        return grad_q, grad_k, grad_v


attention_native_cpu = _NativeAttention()
"""Attention and its log-sum-exp by the kernels of csrc/attention, for q [s, b, n, d] in fp32 or bf16."""
