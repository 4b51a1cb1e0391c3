"""The public vocab-parallel cross-entropy and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megazero.ops.cross_entropy.cuda import vocab_parallel_cross_entropy_cuda
from megazero.ops.cross_entropy.passes import (
    vocab_parallel_cross_entropy_chunked,
    vocab_parallel_cross_entropy_native_cpu,
)
from megazero.ops.cross_entropy.reference import vocab_parallel_cross_entropy_reference
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.native import on_native_cpu
from megazero.ops.reduce_group import ReduceGroup

CROSS_ENTROPY: Operator[Callable[[Tensor, Tensor, ReduceGroup, int, int, bool], Tensor]] = Operator(
    "cross_entropy",
    (
        Implementation("native_cpu", vocab_parallel_cross_entropy_native_cpu, on_native_cpu()),
        Implementation("cuda", vocab_parallel_cross_entropy_cuda, on_cuda_kernels()),
        Implementation("chunked", vocab_parallel_cross_entropy_chunked),
        Implementation("reference", vocab_parallel_cross_entropy_reference),
    ),
)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Loss per token, fp32 [s, b] (fp64 for fp64 logits), of this rank's logits [s, b, v/tp].

    target: int64 [s, b] in [0, vocab_size), equal on all ranks; positions that must not count carry
    any valid target and a zero in the loss mask, which is applied outside. vocab_start: the first
    vocabulary id of this slice. Columns at or beyond vocab_size are padding: they take no part in the
    normalizer and get a zero gradient. Two all-reduces of one and two numbers per token forward, none
    backward. The gradient has the logits' dtype.

    overwrite: backward may write the gradient over the logits, which saves a tensor of their size. Only for a
    caller who does not read them after backward has begun; if backward of something else does, or backward
    runs again, autograd raises RuntimeError.

    Targets are looked at where batches are made (`data.check_token_ids`): here a look would wait for the
    device. One outside the vocabulary makes the loss and the gradient of its row NaN, so that it cannot train
    unnoticed.
    """
    return CROSS_ENTROPY.choose(CallFacts.of(logits)).fn(
        logits, target, group, vocab_start, vocab_size, overwrite
    )
