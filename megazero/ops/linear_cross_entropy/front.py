"""The public projection + vocab-parallel cross-entropy and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import apply
from megazero.ops.cross_entropy.cuda import cuda_passes
from megazero.ops.cross_entropy.passes import CHUNKED_PASSES, NATIVE_CPU_PASSES
from megazero.ops.cuda import CUDA_KERNELS, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.linear_cross_entropy.blocks import BlockwiseLoss, VocabularySlice
from megazero.ops.linear_cross_entropy.reference import linear_cross_entropy_reference
from megazero.ops.native import on_native_cpu
from megazero.ops.reduce_group import ReduceGroup

BLOCK = 8192


def linear_cross_entropy_native_cpu(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    block: int,
) -> Tensor:
    """Loss of each row of fp32 or bf16 x [..., h] on CPU."""
    part = VocabularySlice(group, vocab_start, vocab_size, block, NATIVE_CPU_PASSES)
    return apply(BlockwiseLoss, x, weight, target, part)


def linear_cross_entropy_cuda(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    block: int,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> Tensor:
    """Loss of each row of fp32, fp16 or bf16 x [..., h] on a GPU."""
    part = VocabularySlice(group, vocab_start, vocab_size, block, cuda_passes(kernels))
    return apply(BlockwiseLoss, x, weight, target, part)


def linear_cross_entropy_chunked(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: ReduceGroup,
    vocab_start: int,
    vocab_size: int,
    block: int,
) -> Tensor:
    """Loss of each row of x [..., h] by torch."""
    part = VocabularySlice(group, vocab_start, vocab_size, block, CHUNKED_PASSES)
    return apply(BlockwiseLoss, x, weight, target, part)


LINEAR_CROSS_ENTROPY: Operator[Callable[[Tensor, Tensor, Tensor, ReduceGroup, int, int, int], Tensor]] = (
    Operator(
        "linear_cross_entropy",
        (
            Implementation("native_cpu", linear_cross_entropy_native_cpu, on_native_cpu()),
            Implementation("cuda", linear_cross_entropy_cuda, on_cuda_kernels()),
            Implementation("chunked", linear_cross_entropy_chunked),
            Implementation("reference", linear_cross_entropy_reference),
        ),
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
