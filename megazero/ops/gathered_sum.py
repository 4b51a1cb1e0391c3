"""Weighted sums of gathered rows, which combine the results of a token's experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import compute_dtype
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of


def gathered_sum_reference(
    rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool
) -> Tensor:
    """out[i] = sum over j of weights[i, j] rows[slots[i, j]], where row m is zeros."""
    wide = compute_dtype(rows.dtype)
    terms = F.pad(rows.to(wide), (0, 0, 0, 1))[slots]  # [n, k, h]
    if weights is not None:
        terms = terms * weights.to(wide).unsqueeze(2)
    return terms.sum(1).to(rows.dtype)


@dataclass(frozen=True)
class SumKernel:
    """The two passes; rows [m, h], slots [n, k], choice [m] and wide weights [n, k] or None are contiguous.

    Attributes:
        forward: rows, slots, choice, weights, whole -> the sums [n, h].
        backward: the same, and the gradient of the sums -> the gradients of rows and of weights.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, Tensor], tuple[Tensor, Tensor | None]]


class _GatheredSum(torch.autograd.Function):
    """The sum, which saves its inputs; backward reads each sum's gradient once and scatters nothing."""

    @staticmethod
    def forward(
        ctx: Context[tuple[SumKernel, bool, torch.dtype | None]],
        kernel: SumKernel,
        rows: Tensor,
        slots: Tensor,
        choice: Tensor,
        weights: Tensor | None,
        whole: bool,
    ) -> Tensor:
        rows, slots, choice = rows.contiguous(), slots.contiguous(), choice.contiguous()
        wide = None if weights is None else weights.to(compute_dtype(rows.dtype)).contiguous()
        ctx.save_for_backward(rows, slots, choice, wide)
        ctx.kept = kernel, whole, None if weights is None else weights.dtype
        return kernel.forward(rows, slots, choice, wide, whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[tuple[SumKernel, bool, torch.dtype | None]], grad: Tensor) -> Gradients:
        (rows, slots, choice, wide), (kernel, whole, dtype) = ctx.saved_tensors, ctx.kept
        grad_rows, grad_weights = kernel.backward(rows, slots, choice, wide, whole, grad.contiguous())
        grad_weights = None if grad_weights is None else grad_weights.to(dtype)
        return None, grad_rows, None, None, grad_weights, None


def native_sum(rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool) -> Tensor:
    """One pass of csrc/gathered_sum, for rows in fp32 or bf16 on CPU."""
    (m, h), (n, k) = rows.shape, slots.shape
    out = rows.new_empty(n, h)
    NATIVE.gathered_sum_forward(rows_of(out, h, n), m, k, *map(address, (rows, slots, weights, out)))
    return out


def _native_backward(
    rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    (m, h), (n, k) = rows.shape, slots.shape
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty(n, k)
    tensors = map(address, (rows, slots, choice, weights, grad, grad_rows, grad_weights))
    NATIVE.gathered_sum_backward(rows_of(grad, h, n), m, k, *tensors)
    return grad_rows, None if weights is None else grad_weights


def sum_on_gpu(
    library: KernelLibrary,
    rows: Tensor,
    slots: Tensor,
    choice: Tensor,
    weights: Tensor | None,
    whole: bool,
) -> Tensor:
    """One launch, for rows in fp32, fp16 or bf16; a number that no row has adds nothing."""
    (m, h), (n, k) = rows.shape, slots.shape
    out = rows.new_empty(n, h)
    library.launch("gathered_sum_forward", rows.dtype, n, h, m, k, rows, slots, weights, out)
    return out


def _backward_on_gpu(
    library: KernelLibrary,
    rows: Tensor,
    slots: Tensor,
    choice: Tensor,
    weights: Tensor | None,
    whole: bool,
    grad: Tensor,
) -> tuple[Tensor, Tensor | None]:
    (m, h), (n, k) = rows.shape, slots.shape
    grad_rows, grad_weights = torch.empty_like(rows), None if weights is None else torch.empty_like(weights)
    tensors = (rows, slots, choice, weights, grad, grad_rows, grad_weights)
    library.launch("gathered_sum_backward", rows.dtype, n, h, m, k, int(whole), *tensors)
    return grad_rows, grad_weights


def selected_sum(rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool) -> Tensor:
    """One selection of rows by torch for each of a sum's terms."""
    total: Tensor | None = None
    for j in range(slots.shape[1]):
        row = _selected(rows, slots[:, j], whole)
        if weights is not None:
            row.mul_(weights[:, j : j + 1])
        total = row if total is None else total.add_(row)
    assert total is not None, "a sum has at least one term"
    return total.to(rows.dtype)


def _selected(rows: Tensor, slot: Tensor, whole: bool) -> Tensor:
    """A copy [n, h] of row slot[i] of rows [m, h], in the dtype of the sum; zeros where that is m."""
    wide = compute_dtype(rows.dtype)
    if whole:
        return rows.index_select(0, slot).to(wide)
    if not len(rows):
        return rows.new_zeros(len(slot), rows.shape[1], dtype=wide)
    selected = rows.index_select(0, slot.clamp_max(len(rows) - 1)).to(wide)
    return selected.mul_((slot < len(rows)).unsqueeze(1))


def _selected_backward(
    rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    if not len(slots):
        return torch.zeros_like(rows), None if weights is None else torch.zeros_like(weights)
    number = choice.clamp_min(0)
    per_row = grad.index_select(0, number // slots.shape[1]).to(compute_dtype(rows.dtype))
    if weights is None:
        return per_row.mul_((choice >= 0).unsqueeze(1)).to(rows.dtype), None
    # A choice without a row has the number that is one too high.
    products = F.pad((rows * per_row).sum(1), (0, 1))
    grad_weights = products.index_select(0, slots.view(-1)).view_as(weights)
    scale = weights.view(-1).index_select(0, number).mul_(choice >= 0).unsqueeze(1)
    return per_row.mul_(scale).to(rows.dtype), grad_weights


_NATIVE = SumKernel(native_sum, _native_backward)
_SELECTED = SumKernel(selected_sum, _selected_backward)


def _sum(
    kernel: SumKernel, rows: Tensor, slots: Tensor, choice: Tensor, weights: Tensor | None, whole: bool
) -> Tensor:
    return apply(_GatheredSum, kernel, rows, slots, choice, weights, whole)


def gathered_sum_cuda(
    rows: Tensor,
    slots: Tensor,
    choice: Tensor,
    weights: Tensor | None,
    whole: bool,
    kernels: KernelLibrary | None = None,
) -> Tensor:
    """The sum of rows [m, h] in fp32, fp16 or bf16 on a GPU; a number that no row has adds nothing."""
    library = kernels or cuda_kernels()
    kernel = SumKernel(partial(sum_on_gpu, library), partial(_backward_on_gpu, library))
    return _sum(kernel, rows, slots, choice, weights, whole)


# Tokens, choices of each, rows, channels and the choices that have a row: all of them; some; rows without a
# slot; no rows; no tokens.
PLACES = (
    (5, 2, 10, 8, 10),
    (7, 3, 15, 5, 15),
    (4, 2, 12, 67, 5),
    (3, 1, 0, 4, 0),
    (0, 2, 3, 4, 0),
    (257, 2, 400, 33, 400),
)


def places(n: int, k: int, m: int, kept: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """slots [n, k] and choice [m] of so many random choices that have a row."""
    random = torch.Generator().manual_seed(seed)
    chosen, numbers = (torch.randperm(count, generator=random)[:kept] for count in (n * k, m))
    slots, choice = torch.full((n * k,), m), torch.full((m,), -1)
    slots[chosen], choice[numbers] = numbers, chosen
    return slots.view(n, k), choice


def _call(n: int, k: int, m: int, kept: int) -> Callable[..., Tensor]:
    slots, choice = places(n, k, m, kept)

    def call(f: Callable[..., Tensor], rows: Tensor, weights: Tensor | None = None) -> Tensor:
        where = (x.to(rows.device) for x in (slots, choice))
        return f(rows, *where, weights, kept == m == n * k)

    return call


def _examples() -> Iterator[Example]:
    for n, k, m, h, kept in PLACES:
        label, call = f"{(n, k)} of {(m, h)}", _call(n, k, m, kept)
        yield Example(label, ((m, h), (n, k)), call)
        yield Example(f"{label} unweighted", ((m, h),), call)

    # Two experts for each token, and almost as many blank rows as taken ones.
    n, k, m, h = 48, 2, 128, 1024

    def moves(dtype: torch.dtype) -> dict[str, int]:
        row, taken = h * dtype.itemsize, n * k
        slots = taken * (8 + 4)  # a number and a weight each
        return {
            "gathered_sum_forward": (taken + n) * row + slots,
            "gathered_sum_backward": (n + 2 * taken) * row + slots + taken * 4,
            "gathered_sum_clear": (m - taken) * row + m * 8,
        }

    yield Example("gathered_sum", ((m, h), (n, k)), _call(n, k, m, n * k), traffic=Traffic(moves))


GATHERED_SUM: Operator[Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]] = Operator(
    "gathered_sum",
    (
        Implementation("native_cpu", partial(_sum, _NATIVE), on_native_cpu()),
        Implementation("cuda", gathered_sum_cuda, on_cuda_kernels()),
        Implementation("selected", partial(_sum, _SELECTED)),
        Implementation("reference", gathered_sum_reference),
    ),
    examples=_examples,
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
