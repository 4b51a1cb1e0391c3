"""Projection to the vocabulary and cross-entropy in one, so that the logits are never whole.

A block of the vocabulary is what another rank's slice is: it adds a maximum, a sum of exponentials and, if
it holds the target, a logit for each token (the online softmax of Milakov & Gimelshein 2018). Backward makes
each block of logits again and writes its gradient over it, as Cut Cross-Entropy does (Wijmans et al. 2025).
Blocks are of the vocabulary rather than of tokens, so that a row of the weight gets its gradient from one
product, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.chunks import compute_dtype
from megazero.ops.cross_entropy import (
    CHUNKED_PASSES,
    NATIVE_CPU_PASSES,
    OneRank,
    ReduceGroup,
    SlicePasses,
    cuda_passes,
    local_targets,
    merge_slices,
    targets,
    vocab_parallel_cross_entropy_reference,
)
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example
from megazero.ops.native import on_native_cpu

BLOCK = 8192


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    block: int,
) -> Tensor:
    """Cross-entropy of x [..., h] @ weight [v/tp, h]^T."""
    return vocab_parallel_cross_entropy_reference(F.linear(x, weight), target, group, vocab_start, vocab_size)


@dataclass(frozen=True)
class VocabularySlice:
    """A rank's slice of the vocabulary, and the way in which its logits are computed.

    group: the ranks that hold the other slices. start: the first id here. size: the number of ids of the
    whole vocabulary. block: the number of columns to project to at once. passes: the passes over logits.
    """

    group: ReduceGroup
    start: int
    size: int
    block: int
    passes: SlicePasses

    def held(self, padded: int) -> int:
        """The number of the `padded` columns that are no padding."""
        return min(max(self.size - self.start, 0), padded)

    def blocks(self, padded: int) -> Iterator[tuple[slice, int]]:
        """The blocks that are not padding alone, each with the number of its columns that are no padding."""
        held = self.held(padded)
        for first in range(0, held, self.block):
            columns = slice(first, min(first + self.block, padded))
            yield columns, min(columns.stop, held) - first


def _within(local: Tensor, columns: slice) -> Tensor:
    """The targets' numbers within the block, or -1."""
    here = (local >= columns.start) & (local < columns.stop)
    return torch.where(here, local - columns.start, -1)


class BlockwiseLoss(torch.autograd.Function):
    """Loss of each token of x [..., h] by weight [v/tp, h], and back; saves both and one number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, part: VocabularySlice) -> Tensor:
        """The loss, shaped as target; see `linear_cross_entropy`."""
        rows, padded = x.reshape(-1, x.shape[-1]), weight.shape[0]
        local = local_targets(target, part.start, part.held(padded))
        wide = compute_dtype(x.dtype)
        maximum = torch.full((len(rows),), torch.finfo(wide).min, dtype=wide, device=x.device)
        total, picked = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for columns, counted in part.blocks(padded):
            logits = F.linear(rows, weight[columns])
            highest, summed, logit = part.passes.statistics(logits, counted, _within(local, columns))
            before, maximum = maximum, torch.maximum(maximum, highest)
            total = total * torch.exp(before - maximum) + summed * torch.exp(highest - maximum)
            picked += logit
        loss, normalizer = merge_slices((maximum, total, picked), target, part.group, part.size)
        ctx.save_for_backward(x, weight, local, normalizer)
        ctx.part = part
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """The gradients of x, this slice's part of the sum, and of the weight."""
        x, weight, local, normalizer = ctx.saved_tensors
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1).to(normalizer.dtype)
        grad_rows = torch.zeros_like(rows, dtype=normalizer.dtype)
        grad_weight = torch.zeros_like(weight)
        for columns, counted in ctx.part.blocks(weight.shape[0]):
            logits = F.linear(rows, weight[columns])
            ctx.part.passes.gradient(logits, counted, _within(local, columns), normalizer, grad, logits)
            grad_rows += logits @ weight[columns]
            grad_weight[columns] = logits.t() @ rows
        return grad_rows.to(x.dtype).view(x.shape), grad_weight, None, None


def _loss(
    passes: SlicePasses,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    block: int,
) -> Tensor:
    """Loss of each row of x [..., h] by these passes."""
    part = VocabularySlice(group, vocab_start, vocab_size, block, passes)
    return apply(BlockwiseLoss, x, weight, target, part)


def linear_cross_entropy_cuda(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    block: int,
    kernels: KernelLibrary | None = None,
) -> Tensor:
    """Loss of each row of fp32, fp16 or bf16 x [..., h] on a GPU."""
    passes = cuda_passes(kernels or cuda_kernels())
    return _loss(passes, x, weight, target, group, vocab_start, vocab_size, block)


def _call(s: int, b: int, vocab_size: int, block: int) -> Callable[..., Tensor]:
    target = targets(s, b, vocab_size)
    return lambda f, x, weight: f(x, weight, target.to(x.device), OneRank(), 0, vocab_size, block)


def _examples() -> Iterator[Example]:
    """Blocks of one column, that divide the vocabulary or do not, that are all padding, and one for all."""
    for s, b, h, width, vocab in ((3, 2, 5, 8, 8), (2, 1, 3, 16, 7), (1, 1, 1, 1, 1), (19, 3, 24, 250, 241)):
        for block in (4, 1, 8192) if s < 5 else (100,):
            label = f"{(s, b, h, width)} {vocab=} {block=}"
            call, scales = _call(s, b, vocab, block), (1.0, h**-0.5)
            yield Example(label, ((s, b, h), (width, h)), call, scales)


LINEAR_CROSS_ENTROPY: Operator[Callable[[Tensor, Tensor, Tensor, ReduceGroup, int, int, int], Tensor]] = (
    Operator(
        "linear_cross_entropy",
        (
            Implementation("native_cpu", partial(_loss, NATIVE_CPU_PASSES), on_native_cpu()),
            Implementation("cuda", linear_cross_entropy_cuda, on_cuda_kernels()),
            Implementation("chunked", partial(_loss, CHUNKED_PASSES)),
            Implementation("reference", linear_cross_entropy_reference),
        ),
        examples=_examples,
    )
)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    *,
    block: int = BLOCK,
) -> Tensor:
    """`vocab_parallel_cross_entropy(x @ weight.T, ...)` of x [s, b, h] and weight [v/tp, h], fp32 [s, b].

    The logits are never whole: `block` columns of them exist at a time, forward and, made again, backward.
    So the projection costs four products instead of three. x must be equal on all ranks of the group. Its
    gradient is this slice's part, which the caller adds up over the group; the weight's is whole.
    """
    return LINEAR_CROSS_ENTROPY.choose(CallFacts.of(x)).fn(
        x, weight, target, group, vocab_start, vocab_size, block
    )
