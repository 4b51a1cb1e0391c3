"""The public permutation and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.kernels import KernelLibrary
from megazero.ops.autograd import Gradients, apply
from megazero.ops.cuda import CUDA_KERNELS, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.gathered_sum.cuda import gathered_sum_cuda
from megazero.ops.gathered_sum.front import gathered_sum_native_cpu, gathered_sum_selected
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of
from megazero.ops.permute.cuda import permuted_by_kernel
from megazero.ops.permute.reference import permute_reference

# (x [n, h], slots [n, k], choice [m], whole) -> out [m, h]
_Copy = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
# (rows [m, h], slots [n, k], choice [m], no weights, whole) -> out [n, h]
_Add = Callable[[Tensor, Tensor, Tensor, None, bool], Tensor]


class _Permute(torch.autograd.Function):
    """The permutation; it saves the places alone, and backward sums each token's rows and scatters none."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slots: Tensor, choice: Tensor, whole: bool, copy: _Copy, add: _Add
    ) -> Tensor:
        x, slots, choice = x.contiguous(), slots.contiguous(), choice.contiguous()
        ctx.save_for_backward(slots, choice)
        ctx.whole, ctx.add = whole, add
        return copy(x, slots, choice, whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return ctx.add(grad, *ctx.saved_tensors, None, ctx.whole), *[None] * 5


def _permuted_natively(x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """One pass of csrc/permute."""
    (n, h), k, m = x.shape, slots.shape[1], len(choice)
    out = x.new_empty(m, h)
    tensors = map(address, (x, slots, None if whole else choice, out))
    NATIVE.permute(rows_of(x, h, n), m, k, *tensors)
    return out


def _permuted_by_index(x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """A selection of tokens, and a mask of blank rows."""
    if whole:
        return x.index_select(0, choice // slots.shape[1])
    if not len(x):
        return x.new_zeros(len(choice), x.shape[1])
    rows = x.index_select(0, choice.clamp_min(0) // slots.shape[1])
    return rows.masked_fill_((choice < 0).unsqueeze(1), 0.0)


def permute_native_cpu(x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """The permutation of x [n, h] in fp32 or bf16 on CPU."""
    return apply(_Permute, x, slots, choice, whole, _permuted_natively, gathered_sum_native_cpu)


def permute_cuda(
    x: Tensor, slots: Tensor, choice: Tensor, whole: bool, kernels: KernelLibrary = CUDA_KERNELS
) -> Tensor:
    """The permutation of x [n, h] in fp32, fp16 or bf16 on a GPU; a number that no row has means none."""
    copy = partial(permuted_by_kernel, kernels=kernels)
    add = partial(gathered_sum_cuda, kernels=kernels)
    return apply(_Permute, x, slots, choice, whole, copy, add)


def permute_selected(x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """The permutation by torch, for any device and dtype."""
    return apply(_Permute, x, slots, choice, whole, _permuted_by_index, gathered_sum_selected)


PERMUTE: Operator[Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = Operator(
    "permute",
    (
        Implementation("native_cpu", permute_native_cpu, on_native_cpu()),
        Implementation("cuda", permute_cuda, on_cuda_kernels()),
        Implementation("selected", permute_selected),
        Implementation("reference", permute_reference),
    ),
)


def permute(x: Tensor, slots: Tensor, choice: Tensor, *, whole: bool = False) -> Tensor:
    """out [m, h] with out[slots[i, j]] = x[i], and zeros in the rows that no slot names.

    The transpose of `gathered_sum` without weights, which is its backward: a token's gradient is the sum over
    its rows in order of j, in fp32.

    Args:
        x: [n, h].
        slots: int64 [n, k], distinct numbers of rows; m stands for none, as often as needed.
        choice: int64 [m], where each row is in the flattened slots; -1 where nowhere.
        whole: whether every slot has a row and every row a slot, which may save work.
    """
    return PERMUTE.choose(CallFacts.of(x)).fn(x, slots, choice, whole)
