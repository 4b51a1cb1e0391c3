"""Vocab-parallel cross-entropy whose passes over the logits are the kernels of csrc/cross_entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.ops.cross_entropy.sliced import SlicedCrossEntropy, SlicePasses
from megazero.ops.native import NATIVE, address, rows_of


def _rows(logits: Tensor, columns: int):
    """Rows of which only `columns` count, `stride` apart."""
    count, stride = logits.shape
    return rows_of(logits, columns, count), stride


def _statistics(logits: Tensor, columns: int, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.contiguous()
    numbers = torch.empty(3, logits.shape[0], dtype=torch.float32).unbind()
    tensors = map(address, (logits, local, *numbers))
    NATIVE.cross_entropy_statistics(*_rows(logits, columns), *tensors)
    return numbers


def _gradient(logits: Tensor, columns: int, local: Tensor, normalizer: Tensor, grad: Tensor) -> Tensor:
    logits, grad = logits.contiguous(), grad.contiguous()
    grad_logits = torch.empty_like(logits)
    tensors = map(address, (logits, local, normalizer, grad, grad_logits))
    NATIVE.cross_entropy_gradient(*_rows(logits, columns), *tensors)
    return grad_logits


NATIVE_CPU = SlicePasses(_statistics, _gradient)


def vocab_parallel_cross_entropy_native_cpu(
    logits: Tensor, target: Tensor, group, vocab_start: int, vocab_size: int
) -> Tensor:
    """Loss of each row of fp32 or bf16 logits [..., v/tp] on CPU; fp32 [...]."""
    return SlicedCrossEntropy.apply(logits, target, group, vocab_start, vocab_size, NATIVE_CPU)
