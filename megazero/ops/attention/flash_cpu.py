"""Attention on CPU: torch's flash forward, and a blocked backward of a few matmuls per block.

In bf16 torch's own CPU backward of flash attention takes ten times as long as its forward. This one
recomputes the probabilities from the saved log-sum-exp (Dao et al. 2022), a block of queries at a time,
and skips the keys after a causal block's end.

In bf16 a product is rounded to 8 bits when it leaves the matmul, so a score of 10 would carry an error
of 4% into its probability. Here the matmul itself subtracts the log-sum-exp, which is appended to q as extra
columns that meet columns of ones beside k. It is split into three bf16 numbers whose sum is exact to 24
bits, and the accumulator is fp32. What comes out is log(probability), which is near zero where it matters.
The same trick subtracts the row term of the softmax gradient from dO v^T. Two elementwise passes remain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.kernel import AttentionKernel, Results, above_all_scores
from megazero.ops.chunks import compute_dtype
from megazero.ops.counter_random import KeepRows, keep_columns, keep_multiplier
from megazero.ops.dropout import attention_columns, attention_row_keys

# Scores per block and thread, and queries per block: in fp32 it pays more to skip the causal triangle with
# small blocks, in bf16 to have larger matmuls (measured at 512 queries, 8 heads of 64 channels).
_WIDE_BLOCK, _WIDE_QUERIES = 1 << 18, 64
_NARROW_BLOCK, _NARROW_QUERIES = 1 << 20, 256


@dataclass(frozen=True)
class _Shape:
    """The sizes and options of a call, without its tensors. Queries are aligned to the end of the keys."""

    s: int
    t: int
    heads: int
    groups: int
    causal: bool
    scale: float
    narrow: bool  # bf16 inputs

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(first query, end of queries, end of the keys they may attend to) for each block of queries."""
        elements, queries = (_NARROW_BLOCK, _NARROW_QUERIES) if self.narrow else (_WIDE_BLOCK, _WIDE_QUERIES)
        budget = elements * torch.get_num_threads() // max(1, self.heads * self.t)
        step = min(max(budget, 16), queries)
        for start in range(0, self.s, step):
            stop = min(start + step, self.s)
            keys = min(self.t, max(0, self.t - self.s + stop)) if self.causal else self.t
            if keys:
                yield start, stop, keys


def _foldable(x: Tensor) -> bool:
    """Whether [s, b, n, d] can be viewed as [s, b n, d]."""
    return x.stride(1) == x.shape[2] * x.stride(2)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out [s, b, n d] and log-sum-exp [b, n, s].

    Without a mask the samples are folded into the heads: the kernel writes [batch, s, heads, d], so
    with a batch of one its result is already laid out as [s, b, n d], without a copy.
    """
    s, b, n, d = q.shape
    repeats = n // k.shape[2]
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if mask is None and all(map(_foldable, (q, k, v))):
        heads = [x.view(1, x.shape[0], b * n, d).transpose(1, 2) for x in (q, k, v)]
        out, lse = flash(*heads, is_causal=causal, scale=scale)
        return out.transpose(1, 2).reshape(s, b, n * d), lse.view(b, n, s)
    additive = None
    if mask is not None:
        additive = q.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    out, lse = flash(*heads, is_causal=causal and mask is None, attn_mask=additive, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(s, b, n * d), lse.reshape(b, n, s)


def _split(column: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """`column` as numbers of `dtype` that sum to it: one if the type is wide enough, three for bf16."""
    parts = []
    for _ in range(3 if dtype == torch.bfloat16 else 1):
        part = column.to(dtype)
        parts.append(part)
        column = column - part.to(column.dtype)
    return parts


def _beside(x: Tensor, column: Tensor | None) -> Tensor:
    """x [..., d] with `column` [...] (or ones, to meet it in a product) as extra columns."""
    if column is None:
        width = 3 if x.dtype == torch.bfloat16 else 1
        return torch.cat((x, x.new_ones(*x.shape[:-1], width)), -1)
    return torch.cat((x, *(part.unsqueeze(-1) for part in _split(column, x.dtype))), -1)


def _columns_first(x: Tensor) -> Tensor:
    """[g, t, c] stored as [g, c, t], the layout for which the bf16 matmul is twice as fast."""
    return x.transpose(1, 2).contiguous()


def _first_keys(x: Tensor, keys: int) -> Tensor:
    """The first keys of x [g, c, t], copied: the copy costs less than a strided batch would."""
    return x[:, :, :keys].contiguous()


class _Sample:
    """One sample's queries and keys, ready to compute the probabilities of a block.

    q [s, n, d], k [t, g, d], lse [n, s]; blocked [n or 1, s, t] is True where attention is forbidden.
    """

    def __init__(self, shape: _Shape, q: Tensor, k: Tensor, lse: Tensor, blocked: Tensor | None):
        self.shape, self.blocked = shape, blocked
        # A power of two scales bf16 exactly; any other scale is applied once the scores are fp32.
        exact = q.dtype != torch.bfloat16 or math.frexp(shape.scale)[0] == 0.5
        self.late_scale = 1.0 if exact else shape.scale
        early_scale = shape.scale / self.late_scale
        by_head = (q.transpose(0, 1) * early_scale).contiguous()
        self.q = _beside(by_head, -lse.to(compute_dtype(q.dtype)) / self.late_scale)
        self.k = _columns_first(_beside(k.transpose(0, 1), None))

    def by_group(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of x [n, s, c] as [g, n/g * rows, c]."""
        return x[:, start:stop].reshape(self.shape.groups, -1, x.shape[-1]).contiguous()

    def probabilities(self, start: int, stop: int, keys: int) -> Tensor:
        """[n, stop - start, keys], in q's dtype."""
        log_probs = torch.bmm(self.by_group(self.q, start, stop), _first_keys(self.k, keys))
        log_probs = log_probs.view(self.shape.heads, stop - start, keys)
        diagonal = self.shape.t - self.shape.s + start if self.shape.causal else keys
        probs = _exponentiate(log_probs, self.late_scale, diagonal)
        if self.blocked is not None:
            probs.masked_fill_(self.blocked[:, start:stop, :keys], 0)
        return probs


def _exponentiate(log_probs: Tensor, factor: float, diagonal: int) -> Tensor:
    """exp(factor * log_probs) for [n, queries, keys], 0 beyond key `query + diagonal`; may work in place."""
    if factor == 1.0:
        probs = log_probs.exp_()
    else:
        probs = log_probs.float().mul_(factor).exp_().to(log_probs.dtype)
    probs[..., max(diagonal, 0) :].tril_(min(diagonal, 0))
    return probs


@dataclass(frozen=True)
class _Keep:
    """One sample's dropout: the hashes of its rows [n, s, 1] and of its keys [t]."""

    rows: KeepRows
    columns: Tensor
    p: float

    def multiplier(self, start: int, stop: int, like: Tensor) -> Tensor:
        """0 or 1 for each probability of a block."""
        columns = self.columns[: like.shape[-1]]
        return keep_multiplier(self.rows[:, start:stop], columns, self.p, 1.0).to(like.dtype)


def _keeps(row_keys: Tensor, columns: Tensor, p: float) -> list[_Keep]:
    """Each sample's dropout, from row keys [b, n, s] and the hash of the keys [1 or b, t]."""
    columns = columns.expand(len(row_keys), -1)
    pairs = zip(row_keys, columns, strict=True)
    return [_Keep(KeepRows.of(keys.unsqueeze(-1)), own, p) for keys, own in pairs]


def _dropped_forward(shape: _Shape, samples: Iterator[_Sample], v: Tensor, keeps: list[_Keep]) -> Tensor:
    """[s, b, n, d]: (mask * probabilities) v / (1 - p), block by block."""
    out = v.new_zeros(shape.s, v.shape[1], shape.heads, v.shape[-1])
    for i, (sample, keep) in enumerate(zip(samples, keeps, strict=True)):
        values = v[:, i].transpose(0, 1)
        for start, stop, keys in shape.blocks():
            probs = sample.probabilities(start, stop, keys)
            probs.mul_(keep.multiplier(start, stop, probs))
            block = torch.bmm(probs.view(shape.groups, -1, keys), values[:, :keys])
            out[start:stop, i] = block.view(shape.heads, stop - start, -1).transpose(0, 1)
    return out.div_(1 - keeps[0].p)


@dataclass(frozen=True)
class _Gradients:
    """The tensors to write the gradients of q [s, b, n, d], k and v [t, b, g, d] to."""

    q: Tensor
    k: Tensor
    v: Tensor


def _backward_sample(
    sample: _Sample, tensors: tuple[Tensor, ...], delta: Tensor, keep: _Keep | None, into: _Gradients
) -> None:
    """Write the gradients of one sample to `into`.

    tensors: q [s, n, d], k and v [t, g, d], dO [s, n, d]. delta: [n, s], the sum of dO * O.
    """
    shape = sample.shape
    q, k, v, grad = (x.transpose(0, 1).contiguous() for x in tensors)
    wide = compute_dtype(q.dtype)
    if keep is None:
        grad_beside, v_columns = _beside(grad, -delta), _columns_first(_beside(v, None))
    grad_k, grad_v = torch.zeros(2, shape.groups, q.shape[-1], shape.t, dtype=wide)  # columns first
    grad_q = torch.zeros_like(q)
    for start, stop, keys in shape.blocks():
        probs = sample.probabilities(start, stop, keys)
        grad_block = sample.by_group(grad, start, stop)
        if keep is None:
            kept = probs.view(shape.groups, -1, keys)
            grad_scores = torch.bmm(sample.by_group(grad_beside, start, stop), _first_keys(v_columns, keys))
            grad_v[..., :keys] += torch.bmm(grad_block.transpose(1, 2), kept).to(wide)
            grad_scores.mul_(kept)
        else:
            mask, p = keep.multiplier(start, stop, probs), keep.p
            kept = (probs * mask).view(shape.groups, -1, keys)
            grad_probs = torch.bmm(grad_block, v[:, :keys].transpose(1, 2)).view_as(probs)
            grad_v[..., :keys] += torch.bmm(grad_block.transpose(1, 2), kept).to(wide).div_(1 - p)
            centered = grad_probs.mul_(mask).to(wide).div_(1 - p).sub_(delta[:, start:stop, None])
            grad_scores = centered.mul_(probs).to(q.dtype).view(shape.groups, -1, keys)
        grad_q_block = torch.bmm(grad_scores, k[:, :keys])
        grad_q[:, start:stop] = grad_q_block.view(shape.heads, stop - start, -1)
        q_block = sample.by_group(q, start, stop)
        grad_k[..., :keys] += torch.bmm(q_block.transpose(1, 2), grad_scores).to(wide)
    into.q.copy_(grad_q.mul_(shape.scale).transpose(0, 1))
    into.k.copy_(grad_k.mul_(shape.scale).permute(2, 0, 1))
    into.v.copy_(grad_v.permute(2, 0, 1))


@dataclass(frozen=True, eq=False)
class _Given:
    """A call as this kernel takes it.

    Attributes:
        shape: the sizes.
        mask: bool [b or 1, n or 1, s, t], True where a query may attend to a key; None: causality alone.
        keeps: each sample's dropout; None: nothing is dropped.
    """

    shape: _Shape
    mask: Tensor | None
    keeps: list[_Keep] | None


class _FlashCPU(AttentionKernel):
    def prepare(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> _Given:
        narrow = q.dtype == torch.bfloat16
        causal = call.causal_alone(len(q), len(k))
        shape = _Shape(len(q), len(k), q.shape[2], k.shape[2], causal, call.scale, narrow)
        keeps = None
        if call.dropout is not None:
            columns = keep_columns(attention_columns(call.dropout))
            keeps = _keeps(attention_row_keys(call.dropout, q.shape[2]), columns, call.dropout.p)
        return _Given(shape, call.allowed(q, k), keeps)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, given: _Given, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        shape, mask = given.shape, given.mask
        out, lse = _flash(q, k, v, mask, shape.causal, shape.scale)
        out = out.view(q.shape)
        if given.keeps is not None:
            out = _dropped_forward(shape, _samples(shape, q, k, lse, mask), v, given.keeps)
        # torch's kernel gives 0 for a query that may attend to nothing.
        return out.to(dtype), lse if mask is None else lse.masked_fill(~mask.any(-1), -torch.inf)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, given: _Given, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients; lse's goes into delta, as its derivative by a score is the score's probability."""
        wide, grad, keeps = compute_dtype(q.dtype), results.grad, given.keeps
        delta = torch.linalg.vecdot(grad.to(wide), results.out.to(wide)).permute(1, 2, 0)
        if results.grad_lse is not None:
            delta = delta - results.grad_lse
        lse = above_all_scores(results.lse)
        grads = _Gradients(*(torch.empty(x.shape, dtype=dtype) for x in (q, k, v)))
        for i, sample in enumerate(_samples(given.shape, q, k, lse, given.mask)):
            tensors = tuple(x[:, i] for x in (q, k, v, grad))
            into = _Gradients(grads.q[:, i], grads.k[:, i], grads.v[:, i])
            _backward_sample(sample, tensors, delta[i], None if keeps is None else keeps[i], into)
        return grads.q, grads.k, grads.v


def _samples(shape: _Shape, q: Tensor, k: Tensor, lse: Tensor, mask: Tensor | None) -> Iterator[_Sample]:
    """The samples, each prepared only when its turn comes."""
    b = q.shape[1]
    blocked = None if mask is None else (~mask).expand(b, -1, -1, -1)
    for i in range(b):
        yield _Sample(shape, q[:, i], k[:, i], lse[i], None if blocked is None else blocked[i])


attention_flash_cpu = _FlashCPU()
"""Attention and its log-sum-exp: torch's CPU flash kernel forward, and our blocked backward."""
