"""Selection of rows by number, which takes a layer's tokens out of a sequence and puts them back."""

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
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of

# (source [n, h] or None for zeros, numbers [m], otherwise [m, h] or None for zeros, like) -> out [m, h]
_Copy = Callable[[Tensor | None, Tensor, Tensor | None, Tensor], Tensor]
_Ctx = Context[tuple[_Copy, bool]]


def chosen_rows_reference(
    source: Tensor, numbers: Tensor, inverse: Tensor, otherwise: Tensor | None
) -> Tensor:
    """out[i] = source[numbers[i]], or otherwise[i] where numbers[i] is negative."""
    rows = F.pad(source, (0, 0, 0, 1))[numbers]  # the last row, number -1, is zeros
    return rows if otherwise is None else torch.where((numbers < 0).unsqueeze(1), otherwise, rows)


class _ChosenRows(torch.autograd.Function):
    """The selection; backward runs two more: the inverse for the source, and the rest for `otherwise`."""

    @staticmethod
    def forward(
        ctx: _Ctx, copy: _Copy, source: Tensor, numbers: Tensor, inverse: Tensor, otherwise: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(numbers, inverse)
        ctx.kept = copy, otherwise is not None
        return copy(source, numbers, otherwise, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        (numbers, inverse), (copy, has_rest) = ctx.saved_tensors, ctx.kept
        grad = grad.contiguous()
        of_rest = copy(None, numbers, grad, grad) if has_rest else None
        return None, copy(grad, inverse, None, grad), None, None, of_rest


def _copied_natively(
    source: Tensor | None, numbers: Tensor, otherwise: Tensor | None, like: Tensor
) -> Tensor:
    """One pass of csrc/chosen_rows, for rows in fp32 or bf16 on CPU."""
    kept = [None if x is None else x.contiguous() for x in (source, numbers, otherwise)]
    out = like.new_empty(len(numbers), like.shape[1])
    NATIVE.chosen_rows(rows_of(out, like.shape[1], len(numbers)), *map(address, kept), address(out))
    return out


def _copied_on_gpu(
    library: KernelLibrary, source: Tensor | None, numbers: Tensor, otherwise: Tensor | None, like: Tensor
) -> Tensor:
    """One launch, which does not check the numbers: a row that the source does not have comes out as NaN."""
    source, otherwise = (None if x is None else x.contiguous() for x in (source, otherwise))
    out = like.new_empty(len(numbers), like.shape[1])
    sizes = (len(numbers), like.shape[1] * like.element_size(), 0 if source is None else len(source))
    library.launch("chosen_rows", *sizes, source, numbers.contiguous(), otherwise, out)
    return out


def _copied_by_index(
    source: Tensor | None, numbers: Tensor, otherwise: Tensor | None, like: Tensor
) -> Tensor:
    """A selection of rows by torch, then a mask; for any device and dtype."""
    if source is None:
        assert otherwise is not None, "a row comes from one of the two"
        return otherwise.masked_fill((numbers >= 0).unsqueeze(1), 0.0)
    if not len(source):
        return like.new_zeros(len(numbers), like.shape[1]) if otherwise is None else otherwise.clone()
    rows = source.index_select(0, numbers.clamp_min(0))
    absent = (numbers < 0).unsqueeze(1)
    return rows.masked_fill_(absent, 0.0) if otherwise is None else torch.where(absent, otherwise, rows)


def _chosen(
    copy: _Copy, source: Tensor, numbers: Tensor, inverse: Tensor, otherwise: Tensor | None
) -> Tensor:
    return apply(_ChosenRows, copy, source, numbers, inverse, otherwise)


def chosen_rows_cuda(
    source: Tensor,
    numbers: Tensor,
    inverse: Tensor,
    otherwise: Tensor | None,
    kernels: KernelLibrary | None = None,
) -> Tensor:
    """The choice by a kernel, for rows in fp32, fp16 or bf16 on a GPU."""
    copy = partial(_copied_on_gpu, kernels or cuda_kernels())
    return _chosen(copy, source, numbers, inverse, otherwise)


def _call(numbers: Tensor, inverse: Tensor) -> Callable[..., Tensor]:
    def call(f: Callable[..., Tensor], source: Tensor, otherwise: Tensor | None = None) -> Tensor:
        return f(source, *(x.to(source.device) for x in (numbers, inverse)), otherwise)

    return call


def _examples() -> Iterator[Example]:
    """Some rows chosen, all, none, from none, and rows of one channel."""
    for n, m, taken, h in (
        (7, 12, 3, 5),
        (5, 5, 5, 4),
        (12, 7, 7, 67),
        (0, 3, 0, 4),
        (3, 0, 0, 4),
        (301, 400, 257, 1),
    ):
        random = torch.Generator().manual_seed(n + m)
        places, rows = (torch.randperm(count, generator=random)[:taken] for count in (m, n))
        numbers, inverse = torch.full((m,), -1), torch.full((n,), -1)
        numbers[places], inverse[rows] = rows, places
        label, call = f"{taken} of {(n, h)} among {m}", _call(numbers, inverse)
        yield Example(label, ((n, h), (m, h)), call)
        yield Example(f"{label}, zeros otherwise", ((n, h),), call)

    count, width = 128, 512
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(0))[: count // 2].sort().values
    numbers = torch.full((count,), -1)
    numbers[rows] = torch.arange(count // 2)

    def moves(dtype: torch.dtype) -> dict[str, int]:
        """Half of the rows of either side each way, and their numbers.

        What was chosen is not read for the gradient of the rest, and its rows alone for that of the source.
        """
        row = width * dtype.itemsize
        forward = 2 * count * row + count * 8
        of_rest, of_source = (count + count // 2) * row + count * 8, count * row + count // 2 * 8
        return {"chosen_rows": forward + of_rest + of_source}

    shapes = ((count // 2, width), (count, width))
    yield Example("chosen_rows", shapes, _call(numbers, rows), traffic=Traffic(moves))


CHOSEN_ROWS: Operator[Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = Operator(
    "chosen_rows",
    (
        Implementation("native_cpu", partial(_chosen, _copied_natively), on_native_cpu()),
        Implementation("cuda", chosen_rows_cuda, on_cuda_kernels()),
        Implementation("by_index", partial(_chosen, _copied_by_index)),
        Implementation("reference", chosen_rows_reference),
    ),
    examples=_examples,
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
