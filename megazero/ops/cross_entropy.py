"""Cross-entropy of logits whose vocabulary is sliced over tensor-parallel ranks (Shoeybi et al. 2019).

There are two passes over a rank's logits, one forward and one backward. Forward uses each slice's own maximum
(the online softmax of Milakov & Gimelshein 2018) instead of agreeing on one first, so the ranks reduce three
numbers per token and the logits are read once. Saved: the logits themselves and one number per token. The
contents of padding columns do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels, planned
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of
from megazero.ops.slice_passes import RowGradients, SlicePasses, local_targets


class ReduceGroup(Protocol):
    """The ranks that hold the slices; `mpu.Group` is one."""

    rank: int

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> object:
        """Reduce over the group's ranks in place, by "sum" or "max"."""


class OneRank(ReduceGroup):
    """One rank with the whole vocabulary, for examples."""

    rank = 0

    @property
    def size(self) -> int:
        """One."""
        return 1

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Leave the tensor as it is."""


class VocabularySlice(NamedTuple):
    """A rank's slice of the vocabulary: the ranks with all slices, its first id, and how many there are."""

    group: ReduceGroup
    start: int
    size: int

    def held(self, padded: int) -> int:
        """The number of the slice's `padded` columns that are no padding."""
        return min(max(self.size - self.start, 0), padded)


class TokenLosses(NamedTuple):
    """The results of a cross-entropy, shaped as the targets: fp32, or fp64 for fp64 logits.

    Attributes:
        loss: log Z less the target's logit, in nats.
        log_z: the log of Z, the sum of all exponentials of a token's logits.
    """

    loss: Tensor
    log_z: Tensor


class _GatherVocabulary(torch.autograd.Function):
    """Every rank's slice placed in zeros of the full width and summed; backward takes the slice back."""

    @staticmethod
    def forward(ctx: Context[slice], logits: Tensor, part: VocabularySlice) -> Tensor:
        width = logits.shape[-1]
        ctx.kept = slice(part.start, part.start + width)
        whole = logits.new_zeros(*logits.shape[:-1], width * part.group.size)
        whole[..., ctx.kept] = logits
        part.group.all_reduce(whole, op="sum")
        return whole

    @staticmethod
    def backward(ctx: Context[slice], grad: Tensor) -> Gradients:
        return grad[..., ctx.kept].clone(), None


def gather_vocabulary(logits: Tensor, part: VocabularySlice) -> Tensor:
    """Logits [..., v] of the whole vocabulary from each rank's [..., v/tp]; differentiable."""
    return apply(_GatherVocabulary, logits, part)[..., : part.size]


def vocab_parallel_cross_entropy_reference(
    logits: Tensor, target: Tensor, part: VocabularySlice, overwrite: bool = False
) -> TokenLosses:
    """-log softmax(all ranks' logits, padding left out)[target]; NaN for a target outside the vocabulary.

    It has no use for the permission to overwrite the logits.
    """
    whole = gather_vocabulary(logits.to(compute_dtype(logits.dtype)), part)
    foreign = (target < 0) | (target >= part.size)
    column = target.masked_fill(foreign, 0).unsqueeze(-1)
    picked = torch.log_softmax(whole, -1).gather(-1, column).squeeze(-1)
    loss = -picked * torch.ones_like(picked).masked_fill(foreign, torch.nan)
    return TokenLosses(loss, loss + whole.gather(-1, column).squeeze(-1))


def merge_slices(
    statistics: tuple[Tensor, Tensor, Tensor], target: Tensor, part: VocabularySlice
) -> tuple[Tensor, Tensor]:
    """The loss, shaped as target, and the normalizer [rows] of the whole vocabulary; NaN for no token of it.

    Args:
        statistics: those of this rank's slice, from `SlicePasses.statistics`; the first is overwritten.
        target: the token of each row.
        part: the slice.
    """
    maximum, total, picked = statistics
    of_slice = maximum.clone()
    part.group.all_reduce(maximum, op="max")
    sums = torch.stack((total * torch.exp(of_slice - maximum), picked))
    part.group.all_reduce(sums, op="sum")
    normalizer = sums[0].log_().add_(maximum)
    normalizer.masked_fill_(((target < 0) | (target >= part.size)).view(-1), torch.nan)
    return (normalizer - sums[1]).view(target.shape), normalizer


class SlicedCrossEntropy(torch.autograd.Function):
    """Loss and log Z of each token of logits [..., v/tp], and back."""

    @staticmethod
    def forward(
        ctx: Context[tuple[SlicePasses, int, bool]],
        logits: Tensor,
        target: Tensor,
        part: VocabularySlice,
        passes: SlicePasses,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        """Both, shaped as target; see `vocab_parallel_losses`."""
        padded = logits.shape[-1]
        columns = part.held(padded)
        rows = logits.reshape(-1, padded).contiguous()
        local = local_targets(target, part.start, columns)
        loss, normalizer = merge_slices(passes.statistics(rows, columns, local), target, part)
        ctx.save_for_backward(logits, local, normalizer)
        ctx.kept = passes, columns, overwrite
        ctx.set_materialize_grads(False)
        return loss, normalizer.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context[tuple[SlicePasses, int, bool]], grad: Tensor | None, grad_log_z: Tensor | None
    ) -> Gradients:
        """d logits = grad (softmax - one_hot(target)) + grad_log_z softmax, over them if `overwrite`."""
        (logits, local, normalizer), (passes, columns, overwrite) = ctx.saved_tensors, ctx.kept
        rows = logits.reshape(-1, logits.shape[-1]).contiguous()
        grads = RowGradients.of(grad, grad_log_z, normalizer)
        out = rows if overwrite else torch.empty_like(rows)
        grads.of_logits(passes, rows, columns, local, normalizer, out)
        if overwrite:
            # Whoever else saved the logits for backward gets autograd's error instead of the gradient.
            torch.autograd.graph.increment_version(logits)
        return out.view(logits.shape), *[None] * 4


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


def cuda_passes(library: KernelLibrary) -> SlicePasses:
    """The passes over logits in fp32, fp16 or bf16 by csrc/cross_entropy/cuda.cu."""

    def statistics(logits: Tensor, columns: int, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maximum, total, picked = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))
        tensors = (logits, local, maximum, total, picked)
        library.launch("cross_entropy_statistics", logits.dtype, *logits.shape, columns, *tensors)
        return maximum, total, picked

    def gradient(
        logits: Tensor, columns: int, local: Tensor, normalizer: Tensor, grad: Tensor, out: Tensor
    ) -> None:
        tensors = (logits, local, normalizer, grad.contiguous(), out)
        library.launch("cross_entropy_gradient", logits.dtype, *logits.shape, columns, *tensors)

    return SlicePasses(statistics, gradient)


NATIVE_CPU_PASSES = SlicePasses(_native_statistics, _native_gradient)
CHUNKED_PASSES = SlicePasses(_chunked_statistics, _chunked_gradient)


def _loss(
    passes: SlicePasses, logits: Tensor, target: Tensor, part: VocabularySlice, overwrite: bool = False
) -> TokenLosses:
    """The losses of each row of logits [..., v/tp] by these passes."""
    return TokenLosses(*apply(SlicedCrossEntropy, logits, target, part, passes, overwrite))


def vocab_parallel_cross_entropy_cuda(
    logits: Tensor,
    target: Tensor,
    part: VocabularySlice,
    overwrite: bool = False,
    kernels: KernelLibrary | None = None,
) -> TokenLosses:
    """The losses of each row of fp32, fp16 or bf16 logits [..., v/tp] on a GPU."""
    return _loss(cuda_passes(kernels or cuda_kernels()), logits, target, part, overwrite)


def padded(logits: Tensor, vocab_size: int) -> Tensor:
    """The logits, with large numbers in the columns of padding."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    return logits + 1e4 * (columns >= vocab_size).to(logits.dtype)


def targets(s: int, b: int, vocab_size: int) -> Tensor:
    """int64 [s, b]: ids of the vocabulary, the last one among them."""
    chosen = torch.arange(s * b).view(s, b) * 3 % vocab_size
    chosen[-1, -1] = vocab_size - 1
    return chosen


def with_log_z(losses: TokenLosses) -> Tensor:
    """A number of both results, for examples: the loss with a z-loss."""
    return losses.loss + 0.1 * losses.log_z.square()


def _call(s: int, b: int, vocab_size: int, bad: bool = False, both: bool = False) -> Callable[..., Tensor]:
    target = targets(s, b, vocab_size)

    def call(f: Callable[..., TokenLosses], x: Tensor) -> Tensor:
        if bad:
            x = torch.where(torch.arange(x.shape[-1], device=x.device) == 5, -torch.inf, x)
        losses = f(padded(x, vocab_size), target.to(x.device), VocabularySlice(OneRank(), 0, vocab_size))
        return with_log_z(losses) if both else losses.loss

    return call


def _examples() -> Iterator[Example]:
    for s, b, width, vocab in ((3, 2, 8, 8), (5, 1, 11, 7), (1, 1, 1, 1), (67, 3, 1030, 1021)):
        for scale in (1.0, 200.0):
            label = f"{(s, b, width)} {vocab=} x {scale}"
            yield Example(label, ((s, b, width),), _call(s, b, vocab), scale)
    yield Example("a column of -inf", ((3, 2, 8),), _call(3, 2, 8, bad=True))
    yield Example("with log Z", ((5, 2, 11),), _call(5, 2, 7, both=True))

    rows, width = 8, 16384
    target = targets(rows, 1, width)[:, 0]

    def moves(dtype: torch.dtype) -> dict[str, int]:
        """Logits are read once forward, read and overwritten once backward; some numbers per row."""
        matrix = rows * width * dtype.itemsize
        return {
            "cross_entropy_statistics": matrix + rows * (8 + 3 * 4),
            "cross_entropy_gradient": 2 * matrix + rows * (8 + 2 * 4),
        }

    # What backward overwrites is a result, as a head's logits are, and no leaf.
    call = lambda f, x: f(x * 1, target, VocabularySlice(OneRank(), 0, width), True).loss  # noqa: E731
    yield Example("cross_entropy", ((rows, width),), call, traffic=Traffic(moves))


CROSS_ENTROPY: Operator[Callable[[Tensor, Tensor, VocabularySlice, bool], TokenLosses]] = Operator(
    "cross_entropy",
    (
        Implementation("native_cpu", partial(_loss, NATIVE_CPU_PASSES), on_native_cpu()),
        Implementation("cuda", vocab_parallel_cross_entropy_cuda, on_cuda_kernels()),
        planned(vocab_parallel_cross_entropy_cuda),
        Implementation("chunked", partial(_loss, CHUNKED_PASSES)),
        Implementation("reference", vocab_parallel_cross_entropy_reference),
    ),
    examples=_examples,
)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    part: VocabularySlice,
    *,
    overwrite: bool = False,
) -> Tensor:
    """The loss of `vocab_parallel_losses`, for callers that do not read log Z."""
    return vocab_parallel_losses(logits, target, part, overwrite=overwrite).loss


def vocab_parallel_losses(
    logits: Tensor,
    target: Tensor,
    part: VocabularySlice,
    *,
    overwrite: bool = False,
) -> TokenLosses:
    """Loss and log Z per token, fp32 [s, b] (fp64 for fp64 logits), of this rank's logits [s, b, v/tp].

    target: int64 [s, b] in [0, part.size), equal on all ranks; positions that must not count carry any valid
    target and a zero in the loss mask, which is applied outside. Columns of the `part` at or beyond its size
    are padding: they take no part in the normalizer and get a zero gradient. Two all-reduces of one and two
    numbers per token forward, none backward. The gradient has the logits' dtype.

    overwrite: backward may write the gradient over the logits, which saves a tensor of their size. Only for a
    caller who does not read them after backward has begun; if backward of something else does, or backward
    runs again, autograd raises RuntimeError.

    Targets are looked at where batches are made (`data.check_token_ids`): here a look would wait for the
    device. One outside the vocabulary makes the loss and the gradient of its row NaN, so that it cannot train
    unnoticed.
    """
    return CROSS_ENTROPY.choose(CallFacts.of(logits)).fn(logits, target, part, overwrite)
