"""The public gathered sum and its table of implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.ops.autograd import Gradients, apply
from megazero.ops.chunks import compute_dtype
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.gathered_sum.cuda import gathered_sum_cuda
from megazero.ops.gathered_sum.reference import gathered_sum_reference
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of


class _NativeSum(torch.autograd.Function):
    """The compiled kernels of csrc/gathered_sum: one pass over memory each way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None) -> Tensor:
        rows, slots, choice = rows.contiguous(), slots.contiguous(), choice.contiguous()
        wide = None if weights is None else weights.float().contiguous()
        (m, h), (n, k) = rows.shape, slots.shape
        out = rows.new_empty(n, h)
        NATIVE.gathered_sum_forward(rows_of(out, h, n), m, k, *map(address, (rows, slots, wide, out)))
        ctx.save_for_backward(rows, slots, choice, wide)
        ctx.weights_dtype = None if weights is None else weights.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        rows, slots, choice, wide = ctx.saved_tensors
        (m, h), (n, k) = rows.shape, slots.shape
        grad, grad_rows = grad.contiguous(), torch.empty_like(rows)
        grad_weights = torch.empty(n, k)
        tensors = map(address, (rows, slots, choice, wide, grad, grad_rows, grad_weights))
        NATIVE.gathered_sum_backward(rows_of(grad, h, n), m, k, *tensors)
        return grad_rows, None, None, None if wide is None else grad_weights.to(ctx.weights_dtype)


def gathered_sum_native_cpu(
    rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool
) -> Tensor:
    """The sum of rows [m, h] in fp32 or bf16 on CPU."""
    return apply(_NativeSum, rows, slots, choice, weights)


class _SelectedSum(torch.autograd.Function):
    """One selection of rows for each of a sum's terms; backward selects rows too and scatters none."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, slots, choice, weights)
        total: Tensor | None = None
        for j in range(slots.shape[1]):
            row = _selected(rows, slots[:, j], whole)
            if weights is not None:
                row.mul_(weights[:, j : j + 1])
            total = row if total is None else total.add_(row)
        assert total is not None, "a sum has at least one term"
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        rows, slots, choice, weights = ctx.saved_tensors
        if not len(slots):
            return (
                torch.zeros_like(rows),
                None,
                None,
                None if weights is None else torch.zeros_like(weights),
                None,
            )
        number = choice.clamp_min(0)
        per_row = grad.index_select(0, number // slots.shape[1]).to(compute_dtype(rows.dtype))
        if weights is None:
            return per_row.mul_((choice >= 0).unsqueeze(1)).to(rows.dtype), None, None, None, None
        # A choice without a row has the number that is one too high.
        products = F.pad((rows * per_row).sum(1), (0, 1))
        grad_weights = products.index_select(0, slots.reshape(-1)).view_as(weights)
        scale = weights.reshape(-1).index_select(0, number).mul_(choice >= 0).unsqueeze(1)
        return per_row.mul_(scale).to(rows.dtype), None, None, grad_weights.to(weights.dtype), None


def _selected(rows: Tensor, slot: Tensor, whole: bool) -> Tensor:
    """A copy [n, h] of row slot[i] of rows [m, h], in the dtype of the sum; zeros where that is m."""
    wide = compute_dtype(rows.dtype)
    if whole:
        return rows.index_select(0, slot).to(wide)
    if not len(rows):
        return rows.new_zeros(len(slot), rows.shape[1], dtype=wide)
    selected = rows.index_select(0, slot.clamp_max(len(rows) - 1)).to(wide)
    return selected.mul_((slot < len(rows)).unsqueeze(1))


def gathered_sum_selected(
    rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool
) -> Tensor:
    """The sum by torch, for any device and dtype."""
    return apply(_SelectedSum, rows, slots, choice, weights, whole)


GATHERED_SUM: Operator[Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]] = Operator(
    "gathered_sum",
    (
        Implementation("native_cpu", gathered_sum_native_cpu, on_native_cpu()),
        Implementation("cuda", gathered_sum_cuda, on_cuda_kernels()),
        Implementation("selected", gathered_sum_selected),
        Implementation("reference", gathered_sum_reference),
    ),
)


def gathered_sum(
    rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None = None, *, whole: bool = False
) -> Tensor:
    """out [n, h] with out[i] = sum over j of weights[i, j] rows[slots[i, j]], in order of j.

    Sums are taken in fp32 (fp64 for fp64 rows) and have the rows' dtype. Each is a function of its own rows
    alone, whatever n is. Rows and weights have gradients.

    Args:
        rows: [m, h].
        slots: int64 [n, k], distinct numbers of rows; m stands for none, as often as needed.
        choice: int64 [m], where each row is in the flattened slots; -1 where nowhere.
        weights: [n, k]; None for ones.
        whole: whether every slot has a row and every row a slot, which may save work.
    """
    return GATHERED_SUM.choose(CallFacts.of(rows)).fn(rows, slots, choice, weights, whole)
