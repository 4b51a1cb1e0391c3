"""Rows of a table by token id, the table sliced over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import FLOATS, CallFacts, Implementation, Operator, where
from megazero.ops.example import Example, Traffic

# The number of gradients of one row that make a partial sum, before the row's whole sum.
SEGMENT = 64
_Ctx = Context[tuple[KernelLibrary, torch.Size, int, int]]


def embedding_reference(tokens: Tensor, weight: Tensor, first: int, vocab_size: int) -> Tensor:
    """out[i] = table[tokens[i]], where all rows of the table but first .. first + len(weight) are zeros."""
    table = weight.new_zeros(max(vocab_size, first + len(weight)), weight.shape[1])
    table = torch.cat([table[:first], weight, table[first + len(weight) :]])[:vocab_size]
    return table[tokens]


class _CudaEmbedding(torch.autograd.Function):
    """The look-up, which saves the tokens alone; backward sorts them and sums gradients in their order."""

    @staticmethod
    def forward(
        ctx: _Ctx, tokens: Tensor, weight: Tensor, first: int, vocab_size: int, kernels: KernelLibrary
    ) -> Tensor:
        tokens, weight = tokens.contiguous(), weight.contiguous()
        rows, width = weight.shape
        out = weight.new_empty(*tokens.shape, width)
        sizes = (tokens.numel(), width * weight.element_size(), first, rows, vocab_size)
        kernels.launch("embedding_forward", *sizes, weight, tokens, out)
        ctx.save_for_backward(tokens)
        ctx.kept = kernels, weight.shape, first, vocab_size
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        (tokens,) = ctx.saved_tensors
        kernels, (rows, width), first, vocab_size = ctx.kept
        grad, count = grad.contiguous(), tokens.numel()
        local = tokens.reshape(-1) - first
        known = min(rows, vocab_size - first)
        sorted_rows, order = local.masked_fill((local < 0) | (local >= known), rows).sort(stable=True)
        starts = torch.searchsorted(sorted_rows, torch.arange(rows + 1, device=local.device))
        partials = grad.new_empty(count // SEGMENT, width, dtype=torch.float32)
        grad_weight = grad.new_empty(rows, width)
        tensors = (sorted_rows, order, starts, grad, partials, grad_weight)
        kernels.launch("embedding_backward", grad.dtype, count, rows, width, SEGMENT, *tensors)
        return None, grad_weight, None, None, None


def embedding_cuda(
    tokens: Tensor, weight: Tensor, first: int, vocab_size: int, kernels: KernelLibrary | None = None
) -> Tensor:
    """The look-up in a weight in fp32, fp16 or bf16 on a GPU; a token outside of the vocabulary gives NaN."""
    return apply(_CudaEmbedding, tokens, weight, first, vocab_size, kernels or cuda_kernels())


def embedding_torch(tokens: Tensor, weight: Tensor, first: int, vocab_size: int) -> Tensor:
    """The look-up by torch's kernel; an id outside the vocabulary becomes -1, as padding would answer it."""
    foreign = (tokens < 0) | (tokens >= vocab_size)
    if first == 0 and len(weight) >= vocab_size:
        return F.embedding(tokens.masked_fill(foreign, -1), weight)
    local = tokens - first
    elsewhere = (local < 0) | (local >= len(weight))
    rows = F.embedding(local.masked_fill(elsewhere, 0).masked_fill(foreign, -1), weight)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _call(tokens: Tensor, first: int, vocab_size: int) -> Callable[..., Tensor]:
    return lambda f, weight: f(tokens.to(weight.device), weight, first, vocab_size)


def _examples() -> Iterator[Example]:
    """A whole table, one with padding, its slices, a rank of padding alone, and frequent tokens."""
    for shape, h, first, rows, vocab_size in (
        ((5, 3), 4, 0, 7, 7),
        ((6,), 5, 0, 8, 6),
        ((5, 2), 67, 4, 4, 11),
        ((5, 2), 3, 12, 4, 11),
        ((0, 2), 4, 0, 3, 3),
        ((300, 2), 1, 0, 2, 2),
    ):
        tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(h))
        label = f"{shape} of {vocab_size} from {first}"
        # Frequent tokens: a row's gradient is a sum of many terms that cancel.
        slack = 10.0 if len(tokens) > 100 else 1.0
        yield Example(label, ((rows, h),), _call(tokens, first, vocab_size), slack=slack)

    # One token is frequent: it fills segments, which are added up before its row's sum.
    rows, width, frequent, others = 64, 512, 2 * SEGMENT, 72
    rest = torch.randint(1, rows, (others,), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([torch.zeros(frequent, dtype=torch.int64), rest])

    def moves(dtype: torch.dtype) -> dict[str, int]:
        row, partial, segments = width * dtype.itemsize, width * 4, frequent // SEGMENT
        sums = (others + rows) * row + segments * partial
        return {
            "embedding_forward": (frequent + others) * (2 * row + 8),
            "embedding_segments": frequent * (row + 8) + segments * (16 + partial),
            "embedding_backward": sums + (others + rows + 1) * 8,
        }

    yield Example("embedding", ((rows, width),), _call(tokens, 0, rows), traffic=Traffic(moves))


EMBEDDING: Operator[Callable[[Tensor, Tensor, int, int], Tensor]] = Operator(
    "embedding",
    (
        Implementation("cuda", embedding_cuda, on_cuda_kernels()),
        Implementation("torch", embedding_torch, where(dtypes=FLOATS)),
        Implementation("reference", embedding_reference),
    ),
    examples=_examples,
)


def embedding(tokens: Tensor, weight: Tensor, first: int, vocab_size: int) -> Tensor:
    """out [..., h] with out[i] = weight[tokens[i] - first], and zeros where another rank has that row.

    The weight is a slice of a table by rows (Shoeybi et al. 2019), so the sum over all slices is the whole
    table's answer. Its gradient is added up in fp32 on a GPU, in the tokens' order.

    Args:
        tokens: int64 [...], numbers of rows of the whole table.
        weight: [rows, h], of which the first is row `first` of the table.
        vocab_size: rows of the table that tokens may name; further ones are padding.

    Raises:
        IndexError: (on CPU) a token is not in [0, vocab_size). On a GPU nothing waits for a check: torch's
            kernel fails, ours gives NaN.
    """
    return EMBEDDING.choose(CallFacts.of(weight)).fn(tokens, weight, first, vocab_size)
