"""The permutation of tokens into the rows that experts take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic
from megazero.ops.gathered_sum import PLACES, native_sum, places, selected_sum, sum_on_gpu
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of

# (x [n, h], slots [n, k], choice [m], whole) -> out [m, h]
_Copy = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
# (rows [m, h], slots [n, k], choice [m], no weights, whole) -> out [n, h]
_Add = Callable[[Tensor, Tensor, Tensor, None, bool], Tensor]
_Ctx = Context[tuple[_Add, bool]]


def permute_reference(x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """out[row] = x[choice[row] // k], where token n is zeros."""
    token = torch.where(choice < 0, len(x), choice // slots.shape[1])
    return F.pad(x, (0, 0, 0, 1))[token]


class _Permute(torch.autograd.Function):
    """The permutation; it saves the places alone, and backward sums each token's rows and scatters none."""

    @staticmethod
    def forward(
        ctx: _Ctx, copy: _Copy, add: _Add, x: Tensor, slots: Tensor, choice: Tensor, whole: bool
    ) -> Tensor:
        x, slots, choice = x.contiguous(), slots.contiguous(), choice.contiguous()
        ctx.save_for_backward(slots, choice)
        ctx.kept = add, whole
        return copy(x, slots, choice, whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        (slots, choice), (add, whole) = ctx.saved_tensors, ctx.kept
        return None, None, add(grad.contiguous(), slots, choice, None, whole), None, None, None


def _permuted_natively(x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """One pass of csrc/permute, for x in fp32 or bf16 on CPU."""
    (n, h), k, m = x.shape, slots.shape[1], len(choice)
    out = x.new_empty(m, h)
    tensors = map(address, (x, slots, None if whole else choice, out))
    NATIVE.permute(rows_of(x, h, n), m, k, *tensors)
    return out


def _permuted_on_gpu(library: KernelLibrary, x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """One launch; a number that no row has stands for none."""
    (n, h), k, m = x.shape, slots.shape[1], len(choice)
    out = x.new_empty(m, h)
    library.launch("permute", n, h * x.element_size(), m, k, int(whole), x, slots, choice, out)
    return out


def _permuted_by_index(x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    """A selection of tokens by torch, and a mask of blank rows; for any device and dtype."""
    if whole:
        return x.index_select(0, choice // slots.shape[1])
    if not len(x):
        return x.new_zeros(len(choice), x.shape[1])
    rows = x.index_select(0, choice.clamp_min(0) // slots.shape[1])
    return rows.masked_fill_((choice < 0).unsqueeze(1), 0.0)


def _permuted(copy: _Copy, add: _Add, x: Tensor, slots: Tensor, choice: Tensor, whole: bool) -> Tensor:
    return apply(_Permute, copy, add, x, slots, choice, whole)


def permute_cuda(
    x: Tensor, slots: Tensor, choice: Tensor, whole: bool, kernels: KernelLibrary | None = None
) -> Tensor:
    """The permutation of x [n, h] in fp32, fp16 or bf16 on a GPU; a number that no row has means none."""
    library = kernels or cuda_kernels()
    copy, add = partial(_permuted_on_gpu, library), partial(sum_on_gpu, library)
    return _permuted(copy, add, x, slots, choice, whole)


def _call(n: int, k: int, m: int, kept: int) -> Callable[..., Tensor]:
    slots, choice = places(n, k, m, kept)
    return lambda f, x: f(x, *(t.to(x.device) for t in (slots, choice)), kept == m == n * k)


def _examples() -> Iterator[Example]:
    for n, k, m, h, kept in PLACES:
        yield Example(f"{(n, k)} of {(m, h)}", ((n, h),), _call(n, k, m, kept))

    # Two experts for each token, and almost as many blank rows as taken ones.
    n, k, m, h = 48, 2, 128, 1024

    def moves(dtype: torch.dtype) -> dict[str, int]:
        row, taken = h * dtype.itemsize, n * k
        return {
            "permute": (n + taken) * row + taken * 8,
            "permute_clear": (m - taken) * row + m * 8,
            "gathered_sum_forward": (taken + n) * row + taken * 8,
        }

    yield Example("permute", ((n, h),), _call(n, k, m, n * k), traffic=Traffic(moves))


PERMUTE: Operator[Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = Operator(
    "permute",
    (
        Implementation("native_cpu", partial(_permuted, _permuted_natively, native_sum), on_native_cpu()),
        Implementation("cuda", permute_cuda, on_cuda_kernels()),
        Implementation("selected", partial(_permuted, _permuted_by_index, selected_sum)),
        Implementation("reference", permute_reference),
    ),
    examples=_examples,
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
