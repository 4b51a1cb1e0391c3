"""Projection to the vocabulary and cross-entropy in one, so that the logits are never whole.

A block of the vocabulary is treated like another rank's slice: it contributes a maximum, a sum of
exponentials and, if it holds the target, a logit for each token (the online softmax of Milakov & Gimelshein
2018). Backward makes each block of logits again and writes its gradient over it, as Cut Cross-Entropy does
(Wijmans et al. 2025). Blocks are of the vocabulary, so that a row of the weight gets its gradient from one
product, rounded once. Of a long sequence a block of logits is large too: then the tokens are cut into tiles
as well, whose parts of the weight's gradient are added up in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import compute_dtype
from megazero.ops.cross_entropy import (
    CHUNKED_PASSES,
    NATIVE_CPU_PASSES,
    OneRank,
    TokenLosses,
    VocabularySlice,
    cuda_passes,
    merge_slices,
    targets,
    vocab_parallel_cross_entropy_reference,
    with_log_z,
)
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels, planned
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example
from megazero.ops.native import on_native_cpu
from megazero.ops.slice_passes import RowGradients, SlicePasses, local_targets

BLOCK = 8192
TILE_BYTES = 2**30
"""The most bytes that the float32 logits of a tile and a block take, unless a caller names the tiles."""


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, target: Tensor, part: VocabularySlice, block: int, tiles: int = 0
) -> TokenLosses:
    """Cross-entropy of x [..., h] @ weight [v/tp, h]^T; the logits are whole."""
    return vocab_parallel_cross_entropy_reference(F.linear(x, weight), target, part)


@dataclass(frozen=True)
class Projection:
    """The way in which the logits of a slice of the vocabulary are computed.

    part: the slice. block: the number of columns to project to at once. tiles: the number of tiles of
    tokens; 0 for what `TILE_BYTES` asks for. passes: the passes over logits.
    """

    part: VocabularySlice
    block: int
    tiles: int
    passes: SlicePasses

    def tokens(self, rows: int, padded: int) -> list[slice]:
        """The tiles of so many tokens."""
        width = 4 * min(self.block, padded)
        size = max(1, math.ceil(rows / self.tiles) if self.tiles else TILE_BYTES // width)
        return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]

    def blocks(self, padded: int) -> Iterator[tuple[slice, int]]:
        """The blocks that are not padding alone, each with the number of its columns that are no padding."""
        held = self.part.held(padded)
        for first in range(0, held, self.block):
            columns = slice(first, min(first + self.block, padded))
            yield columns, min(columns.stop, held) - first


def _within(local: Tensor, columns: slice) -> Tensor:
    """The targets' numbers within the block, or -1."""
    here = (local >= columns.start) & (local < columns.stop)
    return torch.where(here, local - columns.start, -1)


class BlockwiseLoss(torch.autograd.Function):
    """Loss and log Z of each token of x [..., h] by weight [v/tp, h], and back.

    Saved are x, the weight and one number per token.
    """

    @staticmethod
    def forward(
        ctx: Context[Projection], x: Tensor, weight: Tensor, target: Tensor, how: Projection
    ) -> tuple[Tensor, Tensor]:
        """Both, shaped as target; see `linear_cross_entropy`."""
        rows, padded = x.reshape(-1, x.shape[-1]), weight.shape[0]
        local = local_targets(target, how.part.start, how.part.held(padded))
        wide = compute_dtype(x.dtype)
        maximum = torch.full((len(rows),), torch.finfo(wide).min, dtype=wide, device=x.device)
        total, picked = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for tokens in how.tokens(len(rows), padded):
            statistics = maximum[tokens], total[tokens], picked[tokens]
            _add_statistics(statistics, rows[tokens], weight, local[tokens], how)
        loss, normalizer = merge_slices((maximum, total, picked), target, how.part)
        ctx.save_for_backward(x, weight, local, normalizer)
        ctx.kept = how
        ctx.set_materialize_grads(False)
        return loss, normalizer.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Projection], grad: Tensor | None, grad_log_z: Tensor | None) -> Gradients:
        """The gradients of x, this slice's part of the sum, and of the weight."""
        (x, weight, local, normalizer), how = ctx.saved_tensors, ctx.kept
        rows, grads = x.reshape(-1, x.shape[-1]), RowGradients.of(grad, grad_log_z, normalizer)
        tiles = how.tokens(len(rows), len(weight))
        grad_x = torch.empty_like(rows)
        grad_weight = torch.zeros_like(weight, dtype=normalizer.dtype if len(tiles) > 1 else weight.dtype)
        for tokens in tiles:
            # Of one tile alone: they are wider than x.
            grad_rows = torch.zeros_like(rows[tokens], dtype=normalizer.dtype)
            for columns, counted in how.blocks(len(weight)):
                logits = F.linear(rows[tokens], weight[columns])
                given = _within(local[tokens], columns), normalizer[tokens]
                grads.at(tokens).of_logits(how.passes, logits, counted, *given, logits)
                grad_rows += logits @ weight[columns]
                if len(tiles) == 1:
                    torch.mm(logits.t(), rows, out=grad_weight[columns])
                else:
                    grad_weight[columns] += logits.t() @ rows[tokens]
                del logits  # before the next block has its own
            grad_x[tokens] = grad_rows
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None, None


def _add_statistics(
    statistics: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    weight: Tensor,
    local: Tensor,
    how: Projection,
) -> None:
    """Merge the blocks' maxima, sums of exponentials and targets' logits of some tokens into `statistics`."""
    maximum, total, picked = statistics
    for columns, counted in how.blocks(len(weight)):
        logits = F.linear(rows, weight[columns])
        highest, summed, logit = how.passes.statistics(logits, counted, _within(local, columns))
        del logits  # before the next block has its own
        before = maximum.clone()
        torch.maximum(maximum, highest, out=maximum)
        total.mul_(torch.exp(before - maximum)).add_(summed * torch.exp(highest - maximum))
        picked += logit


def _loss(
    passes: SlicePasses,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    part: VocabularySlice,
    block: int,
    tiles: int = 0,
) -> TokenLosses:
    """The losses of each row of x [..., h] by these passes."""
    return TokenLosses(*apply(BlockwiseLoss, x, weight, target, Projection(part, block, tiles, passes)))


def linear_cross_entropy_cuda(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    part: VocabularySlice,
    block: int,
    tiles: int = 0,
    kernels: KernelLibrary | None = None,
) -> TokenLosses:
    """The losses of each row of fp32, fp16 or bf16 x [..., h] on a GPU."""
    return _loss(cuda_passes(kernels or cuda_kernels()), x, weight, target, part, block, tiles)


def _call(
    s: int, b: int, vocab_size: int, block: int, tiles: int, both: bool = False
) -> Callable[..., Tensor]:
    target, part = targets(s, b, vocab_size), VocabularySlice(OneRank(), 0, vocab_size)

    def call(f: Callable[..., TokenLosses], x: Tensor, weight: Tensor) -> Tensor:
        losses = f(x, weight, target.to(x.device), part, block, tiles)
        return with_log_z(losses) if both else losses.loss

    return call


def _examples() -> Iterator[Example]:
    """Blocks of one column, that divide the vocabulary or do not, that are all padding, and one for all.

    One tile, of all tokens, and several, of which the last is smaller.
    """
    for s, b, h, width, vocab in ((3, 2, 5, 8, 8), (2, 1, 3, 16, 7), (1, 1, 1, 1, 1), (19, 3, 24, 250, 241)):
        for block in (4, 1, 8192) if s < 5 else (100,):
            for tiles in (0, 4) if s > 1 else (0,):
                label = f"{(s, b, h, width)} {vocab=} {block=} {tiles=}"
                call, scales = _call(s, b, vocab, block, tiles), (1.0, h**-0.5)
                yield Example(label, ((s, b, h), (width, h)), call, scales)
    for tiles in (1, 4):
        call = _call(5, 2, 7, 4, tiles, both=True)
        yield Example(f"with log Z, {tiles=}", ((5, 2, 3), (11, 3)), call, (1.0, 3**-0.5))


LINEAR_CROSS_ENTROPY: Operator[Callable[[Tensor, Tensor, Tensor, VocabularySlice, int, int], TokenLosses]] = (
    Operator(
        "linear_cross_entropy",
        (
            Implementation("native_cpu", partial(_loss, NATIVE_CPU_PASSES), on_native_cpu()),
            Implementation("cuda", linear_cross_entropy_cuda, on_cuda_kernels()),
            planned(linear_cross_entropy_cuda),
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
    part: VocabularySlice,
    *,
    block: int = BLOCK,
    tiles: int = 0,
) -> TokenLosses:
    """`vocab_parallel_losses(x @ weight.T, ...)` of x [s, b, h] and weight [v/tp, h], fp32 [s, b].

    The logits are never whole: only `block` columns for one tile of tokens exist at a time, and backward
    computes them again, so the projection costs four products instead of three. `tiles` is the number of
    tiles of tokens; 0 picks it so that a block of fp32 logits fits `TILE_BYTES`. x must be equal on all ranks
    of the group. Its gradient is this slice's part, which the caller adds up over the group; the weight's is
    whole.
    """
    return LINEAR_CROSS_ENTROPY.choose(CallFacts.of(x)).fn(x, weight, target, part, block, tiles)
