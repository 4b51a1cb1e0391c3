"""Vocab-parallel cross-entropy in row chunks: one pass over the logits forward, one backward.

Forward keeps a running maximum per slice instead of agreeing on it first (the online softmax of
Milakov & Gimelshein 2018), so the ranks reduce three numbers per token and the logits are read once.
Saved: the logits themselves and one number per token. Padding columns are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.chunks import compute_dtype, row_chunks


def _slice_statistics(logits: Tensor, local: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of this rank's columns: row maximum, sum of exp(logit - maximum), and the target's logit or 0.

    logits [rows, columns]; `local` int64 [rows] is the target's column here, valid where `held`.
    """
    wide_type = compute_dtype(logits.dtype)
    rows, columns = logits.shape
    lowest = torch.finfo(wide_type).min
    maximum = torch.full((rows,), lowest, dtype=wide_type, device=logits.device)
    total = torch.zeros_like(maximum)
    if columns == 0:
        return maximum, total, total.clone()
    for chunk in row_chunks(logits, rows, columns):
        wide = logits[chunk].to(wide_type)
        # Clamped, so that a slice of -inf alone sums to 0 instead of exp(-inf + inf).
        torch.amax(wide, -1, out=maximum[chunk]).clamp_(min=lowest)
        wide = torch.sub(wide, maximum[chunk].unsqueeze(1))
        torch.sum(wide.exp_(), -1, out=total[chunk])
    picked = logits.gather(1, local.unsqueeze(1)).squeeze(1).to(wide_type)
    return maximum, total, torch.where(held, picked, 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, group, vocab_start: int, vocab_size: int) -> Tensor:
        padded = logits.shape[-1]
        columns = min(max(vocab_size - vocab_start, 0), padded)
        rows = logits.reshape(-1, padded)
        held = (target >= vocab_start) & (target < vocab_start + columns)
        local = torch.where(held, target - vocab_start, 0).view(-1)
        held = held.view(-1)
        maximum, total, picked = _slice_statistics(rows[:, :columns], local, held)
        slice_maximum = maximum.clone()
        group.all_reduce(maximum, op="max")
        sums = torch.stack((total * torch.exp(slice_maximum - maximum), picked))
        group.all_reduce(sums, op="sum")
        normalizer = sums[0].log_().add_(maximum)
        ctx.save_for_backward(rows, local, held, normalizer)
        ctx.columns, ctx.shape = columns, logits.shape
        return (normalizer - sums[1]).view(target.shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """d logits = grad * (softmax - one_hot(target)), written in the logits' own dtype."""
        rows, local, held, normalizer = ctx.saved_tensors
        columns = ctx.columns
        grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
        grad_rows[:, columns:] = 0
        grad = grad.reshape(-1, 1).to(normalizer.dtype)
        at_target = torch.where(held.unsqueeze(1), -grad, 0)
        for chunk in row_chunks(rows, rows.shape[0], max(columns, 1)):
            if columns == 0:
                break
            probs = torch.sub(rows[chunk, :columns].to(normalizer.dtype), normalizer[chunk].unsqueeze(1))
            probs.exp_().mul_(grad[chunk])
            probs.scatter_add_(1, local[chunk].unsqueeze(1), at_target[chunk])
            grad_rows[chunk, :columns] = probs
        return grad_rows.view(ctx.shape), None, None, None, None


def vocab_parallel_cross_entropy_chunked(
    logits: Tensor, target: Tensor, group, vocab_start: int, vocab_size: int
) -> Tensor:
    """Loss of each row of logits [..., v/tp], chunk by chunk; fp32 [...]."""
    return _CrossEntropy.apply(logits, target, group, vocab_start, vocab_size)
