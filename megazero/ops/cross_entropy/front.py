"""The public vocab-parallel cross-entropy and its table of implementations."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megazero.errors import DataError
from megazero.ops.cross_entropy.chunked import vocab_parallel_cross_entropy_chunked
from megazero.ops.cross_entropy.native_cpu import vocab_parallel_cross_entropy_native_cpu
from megazero.ops.cross_entropy.reference import vocab_parallel_cross_entropy_reference
from megazero.ops.dispatch import Implementation, Operator, choose
from megazero.ops.native import CPU, NATIVE_DTYPES, available


class ReduceGroup(Protocol):
    """What this operator asks of a communicator; `mpu.Group` gives it."""

    size: int
    rank: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> object:
        """Reduce over the group's ranks in place, by "sum" or "max"."""


CROSS_ENTROPY = Operator(
    "cross_entropy",
    (
        Implementation("native_cpu", vocab_parallel_cross_entropy_native_cpu, available, CPU, NATIVE_DTYPES),
        Implementation("chunked", vocab_parallel_cross_entropy_chunked),
        Implementation("reference", vocab_parallel_cross_entropy_reference),
    ),
)


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: ReduceGroup, vocab_start: int, vocab_size: int
) -> Tensor:
    """Loss per token, fp32 [s, b] (fp64 for fp64 logits), of this rank's logits [s, b, v/tp].

    target: int64 [s, b] in [0, vocab_size), equal on all ranks; positions that must not count carry
    any valid target and a zero in the loss mask, which is applied outside. vocab_start: the first
    vocabulary id of this slice. Columns at or beyond vocab_size are padding: they take no part in the
    normalizer and get a zero gradient. Two all-reduces of one and two numbers per token forward, none
    backward. The gradient has the logits' dtype.

    Raises DataError naming the first target outside the vocabulary; on a GPU the check waits for it.
    """
    if target.device.type != "meta" and target.numel():
        low, high = (int(edge) for edge in target.aminmax())
        if low < 0 or high >= vocab_size:
            raise DataError(_out_of_range(target, vocab_size))
    return choose(CROSS_ENTROPY.implementations, logits).fn(logits, target, group, vocab_start, vocab_size)


def _out_of_range(target: Tensor, vocab_size: int) -> str:
    at = ((target < 0) | (target >= vocab_size)).nonzero()[0].tolist()
    return (
        f"`target` must be in [0, {vocab_size}), but is {int(target[tuple(at)])} at {at} of "
        f"{list(target.shape)}; check that the dataset was made with this model's tokenizer."
    )
