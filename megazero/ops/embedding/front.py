"""The public embedding and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import FLOATS, CallFacts, Implementation, Operator, where
from megazero.ops.embedding.cuda import embedding_cuda
from megazero.ops.embedding.reference import embedding_reference


def embedding_torch(tokens: Tensor, weight: Tensor, first: int, vocab_size: int) -> Tensor:
    """The look-up by torch's kernel; an id outside the vocabulary becomes -1, as padding would answer it."""
    foreign = (tokens < 0) | (tokens >= vocab_size)
    if first == 0 and len(weight) >= vocab_size:
        return F.embedding(tokens.masked_fill(foreign, -1), weight)
    local = tokens - first
    elsewhere = (local < 0) | (local >= len(weight))
    rows = F.embedding(local.masked_fill(elsewhere, 0).masked_fill(foreign, -1), weight)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


EMBEDDING: Operator[Callable[[Tensor, Tensor, int, int], Tensor]] = Operator(
    "embedding",
    (
        Implementation("cuda", embedding_cuda, on_cuda_kernels()),
        Implementation("torch", embedding_torch, where(dtypes=FLOATS)),
        Implementation("reference", embedding_reference),
    ),
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
        IndexError: (on CPU) a token is not in [0, vocab_size). A GPU does not wait to look: torch's kernel
            stops at it, ours answers NaN.
    """
    return EMBEDDING.choose(CallFacts.of(weight)).fn(tokens, weight, first, vocab_size)
