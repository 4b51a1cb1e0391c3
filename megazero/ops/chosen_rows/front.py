"""The public choice of rows and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.chosen_rows.cuda import copied_by_kernel
from megazero.ops.chosen_rows.reference import chosen_rows_reference
from megazero.ops.cuda import CUDA_KERNELS, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of

# (source [n, h] or None for zeros, numbers [m], otherwise [m, h] or None for zeros, like) -> out [m, h]
_Copy = Callable[[Tensor | None, Tensor, Tensor | None, Tensor], Tensor]


class _ChosenRows(torch.autograd.Function):
    """The choice; backward is two more: the inverse for the source, and the rest for `otherwise`."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, numbers: Tensor, inverse: Tensor, otherwise: Tensor | None, copy: _Copy
    ) -> Tensor:
        ctx.save_for_backward(numbers, inverse)
        ctx.copy, ctx.has_rest = copy, otherwise is not None
        return copy(source, numbers, otherwise, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        numbers, inverse = ctx.saved_tensors
        grad = grad.contiguous()
        of_rest = ctx.copy(None, numbers, grad, grad) if ctx.has_rest else None
        return ctx.copy(grad, inverse, None, grad), None, None, of_rest, None


def _copied_natively(
    source: Tensor | None, numbers: Tensor, otherwise: Tensor | None, like: Tensor
) -> Tensor:
    """One pass of csrc/chosen_rows."""
    kept = [None if x is None else x.contiguous() for x in (source, numbers, otherwise)]
    out = like.new_empty(len(numbers), like.shape[1])
    NATIVE.chosen_rows(rows_of(out, like.shape[1], len(numbers)), *map(address, kept), address(out))
    return out


def _copied_by_index(
    source: Tensor | None, numbers: Tensor, otherwise: Tensor | None, like: Tensor
) -> Tensor:
    """A selection of rows, then a mask; for any device."""
    if source is None:
        assert otherwise is not None, "a row comes from one of the two"
        return otherwise.masked_fill((numbers >= 0).unsqueeze(1), 0.0)
    if not len(source):
        return like.new_zeros(len(numbers), like.shape[1]) if otherwise is None else otherwise.clone()
    rows = source.index_select(0, numbers.clamp_min(0))
    absent = (numbers < 0).unsqueeze(1)
    return rows.masked_fill_(absent, 0.0) if otherwise is None else torch.where(absent, otherwise, rows)


def chosen_rows_native_cpu(
    source: Tensor, numbers: Tensor, inverse: Tensor, otherwise: Tensor | None
) -> Tensor:
    """The choice by csrc/chosen_rows, for rows in fp32 or bf16 on CPU."""
    return apply(_ChosenRows, source, numbers, inverse, otherwise, _copied_natively)


def chosen_rows_cuda(
    source: Tensor,
    numbers: Tensor,
    inverse: Tensor,
    otherwise: Tensor | None,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> Tensor:
    """The choice by a kernel, for rows in fp32, fp16 or bf16 on a GPU."""
    copy = partial(copied_by_kernel, kernels=kernels)
    return apply(_ChosenRows, source, numbers, inverse, otherwise, copy)


def chosen_rows_by_index(
    source: Tensor, numbers: Tensor, inverse: Tensor, otherwise: Tensor | None
) -> Tensor:
    """The choice by torch, for any device and dtype."""
    return apply(_ChosenRows, source, numbers, inverse, otherwise, _copied_by_index)


CHOSEN_ROWS: Operator[Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = Operator(
    "chosen_rows",
    (
        Implementation("native_cpu", chosen_rows_native_cpu, on_native_cpu()),
        Implementation("cuda", chosen_rows_cuda, on_cuda_kernels()),
        Implementation("by_index", chosen_rows_by_index),
        Implementation("reference", chosen_rows_reference),
    ),
)


def chosen_rows(source: Tensor, numbers: Tensor, inverse: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """out [m, h] with out[i] = source[numbers[i]], or otherwise[i] where numbers[i] is -1.

    Rows are copied, not computed with. Source and `otherwise` have gradients: nothing is scattered, because
    the inverse choice says which row of the result each row of the source went to.

    Args:
        source: [n, h].
        numbers: int64 [m], numbers of rows of the source, each at most once, or -1.
        inverse: int64 [n], where in `numbers` each row of the source is; -1 where nowhere.
        otherwise: [m, h], in the source's dtype; None for zeros.
    """
    return CHOSEN_ROWS.choose(CallFacts.of(source)).fn(source, numbers, inverse, otherwise)
