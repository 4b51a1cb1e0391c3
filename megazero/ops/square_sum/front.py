"""The public sum of squares and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import groupby

import torch
from torch import Tensor

from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, CUDA, CallFacts, Implementation, Operator, where
from megazero.ops.square_sum.cuda import square_sum_cuda
from megazero.ops.square_sum.reference import square_sum_reference

# Elements per partial sum on CPU: few enough for an fp32 sum to be accurate to 1e-7, and for an fp64 copy to
# stay in the second-level cache.
_BLOCK = 1 << 16


def square_sum_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The sum by torch's norm of each tensor, in fp32 unless the tensors are fp64.

    A GPU sums as a tree, which keeps fp32 accurate enough, and widens while reading; for fp64, torch would
    first make an fp64 copy. The result is not finite if a norm is above 1.8 x 10^19.
    """
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    norms: list[Tensor] = [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors]
    return reduce(torch.add, (norm.double().square() for norm in norms))


def square_sum_blocks(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of short partial sums in fp64; those of fp32 are themselves taken in fp32 if it holds them."""
    return reduce(torch.add, map(_in_blocks, tensors))


def _in_blocks(tensor: Tensor) -> Tensor:
    blocks = tensor.reshape(-1).split(_BLOCK)
    if tensor.dtype == torch.float32:
        # Twice as fast as in fp64: 7 against 14 ms for 2.3 x 10^7 elements on one core.
        total = _dot_sum(blocks)
        if torch.isfinite(total):
            return total
    return _dot_sum(block.double() for block in blocks)


def _dot_sum(blocks: Iterable[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for block in blocks:
        total += torch.dot(block, block)
    return total


SQUARE_SUM: Operator[Callable[[Sequence[Tensor]], Tensor]] = Operator(
    "square_sum",
    (
        Implementation("cuda", square_sum_cuda, on_cuda_kernels()),
        Implementation("norms", square_sum_norms, where(CUDA)),
        Implementation("blocks", square_sum_blocks, where(CPU)),
        Implementation("reference", square_sum_reference),
    ),
)


@torch.no_grad()
def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements of all tensors, in fp64.

    Neither fp16's range (any number above 256 squares to inf) nor the length of a flat tensor (one fp32 sum
    of 2.3 x 10^7 terms was off by 0.3%) spoils it.

    Args:
        tensors: at least one; of any shape and float type, on one device.

    Returns:
        fp64 scalar tensor `[]` on the tensors' device; nothing is copied to the host.
    """
    runs = [list(alike) for _, alike in groupby(tensors, key=lambda tensor: tensor.dtype)]
    return reduce(torch.add, (SQUARE_SUM.choose(CallFacts.of(run[0])).fn(run) for run in runs))
