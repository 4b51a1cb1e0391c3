"""The two passes over a rank's logits: by the kernels of csrc/cross_entropy, and by torch in row chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.autograd import apply
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.cross_entropy.sliced import SlicedCrossEntropy, SlicePasses, SliceUse
from megazero.ops.native import NATIVE, address, rows_of
from megazero.ops.reduce_group import ReduceGroup


def _rows(logits: Tensor, columns: int) -> tuple[NATIVE.Rows, int]:
    """Rows of which only `columns` count, `stride` apart."""
    count, stride = logits.shape
    return rows_of(logits, columns, count), stride


def _native_statistics(logits: Tensor, columns: int, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    maximum, total, picked = torch.empty(3, logits.shape[0], dtype=torch.float32).unbind()
    tensors = map(address, (logits, local, maximum, total, picked))
    NATIVE.cross_entropy_statistics(*_rows(logits, columns), *tensors)
    return maximum, total, picked


def _native_gradient(
    logits: Tensor, columns: int, local: Tensor, normalizer: Tensor, grad: Tensor, out: Tensor
) -> None:
    grad = grad.contiguous()
    tensors = map(address, (logits, local, normalizer, grad, out))
    NATIVE.cross_entropy_gradient(*_rows(logits, columns), *tensors)


NATIVE_CPU_PASSES = SlicePasses(_native_statistics, _native_gradient)


def vocab_parallel_cross_entropy_native_cpu(
    logits: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    overwrite: bool = False,
) -> Tensor:
    """Loss of each row of fp32 or bf16 logits [..., v/tp] on CPU; fp32 [...]."""
    how = SliceUse(NATIVE_CPU_PASSES, overwrite)
    return apply(SlicedCrossEntropy, logits, target, group, vocab_start, vocab_size, how)


def _chunked_statistics(logits: Tensor, columns: int, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide_type = compute_dtype(logits.dtype)
    rows = logits.shape[0]
    lowest = torch.finfo(wide_type).min
    maximum = torch.full((rows,), lowest, dtype=wide_type, device=logits.device)
    total = torch.zeros_like(maximum)
    if columns == 0:
        return maximum, total, total.clone()
    for chunk in row_chunks(logits, rows, columns):
        wide = logits[chunk, :columns].to(wide_type)
        # Clamped, so that a slice of -inf alone sums to 0 instead of exp(-inf + inf).
        torch.amax(wide, -1, out=maximum[chunk]).clamp_(min=lowest)
        wide = torch.sub(wide, maximum[chunk].unsqueeze(1))
        torch.sum(wide.exp_(), -1, out=total[chunk])
    picked = logits.gather(1, local.clamp(min=0).unsqueeze(1)).squeeze(1).to(wide_type)
    return maximum, total, torch.where(local < 0, 0, picked)


def _chunked_gradient(
    logits: Tensor, columns: int, local: Tensor, normalizer: Tensor, grad: Tensor, out: Tensor
) -> None:
    out[:, columns:].zero_()
    if columns == 0:
        return
    at_target = torch.where(local < 0, 0, -grad).unsqueeze(1)
    column = local.clamp(min=0).unsqueeze(1)
    for chunk in row_chunks(logits, logits.shape[0], columns):
        probs = torch.sub(logits[chunk, :columns].to(normalizer.dtype), normalizer[chunk].unsqueeze(1))
        probs.exp_().mul_(grad[chunk].unsqueeze(1))
        probs.scatter_add_(1, column[chunk], at_target[chunk])
        out[chunk, :columns] = probs


CHUNKED_PASSES = SlicePasses(_chunked_statistics, _chunked_gradient)


def vocab_parallel_cross_entropy_chunked(
    logits: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    overwrite: bool = False,
) -> Tensor:
    """Loss of each row of logits [..., v/tp], chunk by chunk; fp32 [...]."""
    how = SliceUse(CHUNKED_PASSES, overwrite)
    return apply(SlicedCrossEntropy, logits, target, group, vocab_start, vocab_size, how)
