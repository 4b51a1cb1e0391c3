"""KL divergence of two predictions whose vocabulary is sliced over tensor-parallel ranks.

There are two passes over a rank's logits, one forward and one backward. With z and t for the logits of
student and teacher over the temperature, the divergence is E_p[t - z] - log sum exp t + log sum exp z with
p = softmax(t), so a slice adds three sums, each over an exponential of which the largest is 1. Saved: both
logits and two numbers per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.cross_entropy import OneRank, VocabularySlice, gather_vocabulary, padded
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example

_Ctx = Context[tuple[int, torch.Size, float]]


def vocab_parallel_kl_divergence_reference(
    student: Tensor, teacher: Tensor, part: VocabularySlice, temperature: float
) -> Tensor:
    """Sum over the vocabulary of p_teacher (log p_teacher - log p_student)."""
    wide = compute_dtype(student.dtype)
    mine, its = (
        torch.log_softmax(gather_vocabulary(x.to(wide), part) / temperature, -1)
        for x in (student, teacher.detach())
    )
    return (its.exp() * (its - mine)).sum(-1)


class _SlicedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Ctx, student: Tensor, teacher: Tensor, part: VocabularySlice, temperature: float
    ) -> Tensor:
        padded = student.shape[-1]
        columns = part.held(padded)
        mine, its = student.reshape(-1, padded), teacher.reshape(-1, padded)
        maxima, sums = _statistics(mine, its, columns, temperature)
        here = maxima.clone()
        part.group.all_reduce(maxima, op="max")
        shrink = torch.exp(here - maxima)
        sums *= torch.stack((shrink[0], shrink[1], shrink[1]))
        part.group.all_reduce(sums, op="sum")
        normalizers = sums[:2].log().add_(maxima)
        ctx.save_for_backward(mine, its, normalizers)
        ctx.kept = columns, student.shape, temperature
        return (sums[2] / sums[1] - normalizers[1] + normalizers[0]).view(student.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        """d student = grad * (softmax of the student - softmax of the teacher) / temperature."""
        mine, its, normalizers = ctx.saved_tensors
        columns, shape, temperature = ctx.kept
        scale = (grad.reshape(-1).to(normalizers.dtype) / temperature).unsqueeze(1)
        grad_mine = torch.empty_like(mine, memory_format=torch.contiguous_format)
        grad_mine[:, columns:].zero_()
        for chunk in row_chunks(mine, len(mine), columns):
            probs, wanted = (
                torch.sub(_scaled(x[chunk, :columns], temperature), normalizer[chunk].unsqueeze(1)).exp_()
                for x, normalizer in zip((mine, its), normalizers, strict=True)
            )
            grad_mine[chunk, :columns] = probs.sub_(wanted).mul_(scale[chunk])
        return grad_mine.view(shape), None, None, None


def _statistics(mine: Tensor, its: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Statistics of rows of logits [rows, width], of which the first `columns` count.

    Returns:
        The maxima of student and teacher, at least the lowest number of their type, [2, rows]; and the sums
        of exp(z - max z), exp(t - max t) and exp(t - max t) (t - z), [3, rows].
    """
    wide, rows = compute_dtype(mine.dtype), len(mine)
    lowest = torch.finfo(wide).min
    maxima = torch.full((2, rows), lowest, dtype=wide, device=mine.device)
    sums = torch.zeros(3, rows, dtype=wide, device=mine.device)
    if columns == 0:
        return maxima, sums
    for chunk in row_chunks(mine, rows, columns):
        z, t = (_scaled(x[chunk, :columns], temperature) for x in (mine, its))
        difference = t - z
        for x, maximum, total in zip((z, t), maxima, sums, strict=False):
            torch.amax(x, -1, out=maximum[chunk])
            x.sub_(maximum[chunk].unsqueeze(1)).exp_()
            torch.sum(x, -1, out=total[chunk])
        torch.sum(difference.mul_(t), -1, out=sums[2][chunk])
    return maxima, sums


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """The logits over the temperature, as a new tensor in the dtype to compute in."""
    return torch.div(logits.to(compute_dtype(logits.dtype)), temperature)


def vocab_parallel_kl_divergence_chunked(
    student: Tensor, teacher: Tensor, part: VocabularySlice, temperature: float
) -> Tensor:
    """Divergence of each row of logits [..., v/tp], chunk by chunk; fp32 [...]."""
    return apply(_SlicedDivergence, student, teacher, part, temperature)


def _call(
    shape: tuple[int, int, int], scale: float, vocab_size: int, temperature: float
) -> Callable[..., Tensor]:
    teacher = torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1])) * scale

    def call(f: Callable[..., Tensor], student: Tensor) -> Tensor:
        logits = (padded(x, vocab_size) for x in (student, teacher.to(student)))
        return f(*logits, VocabularySlice(OneRank(), 0, vocab_size), temperature)

    return call


def _examples() -> Iterator[Example]:
    for s, b, width, vocab in ((3, 2, 8, 8), (5, 1, 11, 7), (1, 1, 1, 1), (67, 3, 1030, 1021)):
        for scale, temperature in ((1.0, 1.0), (1.0, 3.0), (200.0, 1.0)):
            label, shape = f"{(s, b, width)} {vocab=} x {scale} / {temperature}", (s, b, width)
            call = _call(shape, scale, vocab, temperature)
            yield Example(label, (shape,), call, scale, slack=scale)


KL_DIVERGENCE: Operator[Callable[[Tensor, Tensor, VocabularySlice, float], Tensor]] = Operator(
    "kl_divergence",
    (
        Implementation("chunked", vocab_parallel_kl_divergence_chunked),
        Implementation("reference", vocab_parallel_kl_divergence_reference),
    ),
    examples=_examples,
)


def vocab_parallel_kl_divergence(
    student: Tensor, teacher: Tensor, part: VocabularySlice, temperature: float = 1.0
) -> Tensor:
    """KL(teacher || student) of each token in nats, fp32 [s, b] (fp64 for fp64 logits), as distillation uses
    it (Hinton et al. 2015).

    Both predictions are softmaxes of logits divided by `temperature`, over the whole vocabulary and not over
    this rank's slice of it. Two all-reduces of two and three numbers per token forward, none backward.

    Args:
        student: this rank's logits [s, b, v/tp].
        teacher: the teacher's, of the same shape; no gradient goes there.
        part: this rank's slice of the vocabulary; columns at or beyond its size are padding, which takes no
            part and gets a zero gradient.
        temperature: positive; above 1 it evens both predictions out.
    """
    return KL_DIVERGENCE.choose(CallFacts.of(student)).fn(student, teacher, part, temperature)
