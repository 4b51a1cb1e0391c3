"""The public permutation and its table of implementations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.gathered_sum import gathered_sum
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of
from megazero.ops.permute.cuda import permute_cuda
from megazero.ops.permute.reference import permute_reference


class _NativePermute(torch.autograd.Function):
    """csrc/permute, and csrc/gathered_sum for backward: one pass over memory each way."""

    @staticmethod
    def forward(ctx, x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
        x, slots, choice = x.contiguous(), slots.contiguous(), choice.contiguous()
        (n, h), k, m = x.shape, slots.shape[1], len(choice)
        out = x.new_empty(m, h)
        blank = 0 if whole else choice.data_ptr()
        NATIVE.permute(rows_of(x, h, n), m, k, address(x), address(slots), blank, address(out))
        ctx.save_for_backward(slots)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (slots,) = ctx.saved_tensors
        grad, (n, k), (m, h) = grad.contiguous(), slots.shape, grad.shape
        grad_x = grad.new_empty(n, h)
        NATIVE.gathered_sum_forward(rows_of(grad, h, n), m, k, *map(address, (grad, slots, None, grad_x)))
        return grad_x, None, None, None


def permute_native_cpu(x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """For x [n, h] in fp32 or bf16 on CPU."""
    return _NativePermute.apply(x, slots, choice, whole)


class _SelectedRows(torch.autograd.Function):
    """A selection of tokens; backward selects rows too and scatters none."""

    @staticmethod
    def forward(ctx, x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
        ctx.save_for_backward(slots, choice)
        ctx.whole = whole
        if whole:
            return x.index_select(0, choice // slots.shape[1])
        if not len(x):
            return x.new_zeros(len(choice), x.shape[1])
        found = x.index_select(0, choice.clamp_min(0) // slots.shape[1])
        return found.masked_fill_((choice < 0).unsqueeze(1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return gathered_sum(grad, *ctx.saved_tensors, whole=ctx.whole), None, None, None


def permute_selected(x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """For any device and dtype."""
    return _SelectedRows.apply(x, slots, choice, whole)


PERMUTE = Operator(
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
