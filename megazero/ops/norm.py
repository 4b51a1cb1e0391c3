"""The parts that both norms share: the autograd function, the kernels for GPUs, and the norm of a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import compute_dtype
from megazero.ops.cuda import cuda_kernels, planned
from megazero.ops.dispatch import Operator
from megazero.ops.example import Example, Traffic, sums_moved

# The sum, the norm and each row's statistics.
Normalized = tuple[Tensor, Tensor, list[Tensor]]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class NormKernel:
    """The two passes of a norm; all tensors are contiguous.

    Attributes:
        reads: the dtypes of x and of all parameters -> whether the passes take such parameters as they are,
            and make gradients like them; otherwise parameters are widened, and gradients are wide.
        forward: x, a residual or None, the parameters and eps -> x + residual (x itself without one), the
            norm of that, and each row's statistics.
        backward: the sum, the weight, the statistics, the gradient of the norm and, if one arrives, that of
            the sum -> the gradients of the sum and of each parameter.
        sums: the same for kernels that also return the sum over rows of the sum's gradient; None: they
            cannot.
    """

    forward: Callable[[Tensor, Tensor | None, list[Tensor], float], Normalized]
    backward: Callable[[Tensor, Tensor, list[Tensor], Tensor, Tensor | None], list[Tensor]]
    reads: Callable[[torch.dtype, set[torch.dtype]], bool] = lambda x, parameters: False
    sums: Callable[[Tensor, Tensor, list[Tensor], Tensor, Tensor | None], list[Tensor]] | None = None


_Ctx = Context[tuple[NormKernel, list[torch.dtype], torch.dtype | None, bool]]


class Norm(torch.autograd.Function):
    """The norm of x, or of x + residual and that sum; it saves what is normalized and numbers per row."""

    @staticmethod
    def forward(
        ctx: _Ctx,
        kernel: NormKernel,
        eps: float,
        x: Tensor,
        residual: Tensor | None,
        both: bool,
        included: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """The norm, and the sum (x itself without a residual) if `both` are wanted."""
        dtypes = [parameter.dtype for parameter in parameters]
        as_is = kernel.reads(x.dtype, set(dtypes))
        wide_type = None if as_is else compute_dtype(x.dtype)
        taken = [(p if as_is else p.to(wide_type)).contiguous() for p in parameters]
        added = None if residual is None else residual.contiguous()
        total, y, statistics = kernel.forward(x.contiguous(), added, taken, eps)
        ctx.save_for_backward(total, taken[0], *statistics)  # the bias takes no part in backward
        ctx.kept = kernel, dtypes, None if included is None else included.dtype, residual is not None
        ctx.set_materialize_grads(False)
        return (y, total) if both else (y,)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor | None, grad_total: Tensor | None = None) -> Gradients:
        """The gradients of x, the residual and the parameters."""
        total, weight, *statistics = ctx.saved_tensors
        kernel, dtypes, included, added = ctx.kept
        grad = torch.zeros_like(total) if grad is None else grad.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        passes = kernel.backward if included is None else kernel.sums
        assert passes is not None, "these kernels make no gradients of such biases"
        grad_x, *grads = passes(total, weight, statistics, grad, grad_total)
        of_included = None if included is None else grads.pop().to(included)
        own = [summed.to(dtype) for summed, dtype in zip(grads, dtypes, strict=True)]
        return None, None, grad_x, grad_x if added else None, None, of_included, *own


def normalized(kernel: NormKernel, eps: float, x: Tensor, *parameters: Tensor) -> Tensor:
    """The norm of x [..., h]; parameters [h] may have any float type."""
    return apply(Norm, kernel, eps, x, None, False, None, *parameters)[0]


def added(
    kernel: NormKernel,
    eps: float,
    x: Tensor,
    residual: Tensor | None,
    included: Tensor | None,
    *parameters: Tensor,
) -> Pair:
    """The norm of x + residual, and x + residual, in one pass over memory; and so backward.

    included: a bias [h] that x contains already, or None; backward computes its gradient too.
    """
    y, total = apply(Norm, kernel, eps, x, residual, True, included, *parameters)
    return y, total


def on_gpu(name: str, kernels: KernelLibrary | None) -> NormKernel:
    """The passes of csrc/layer_norm or csrc/rms_norm: sums over rows are in fp32 and in a fixed order."""
    library = kernels or cuda_kernels()
    return library.once(name, lambda: _passes(name, library))


def _passes(name: str, library: KernelLibrary) -> NormKernel:
    numbers = 2 if name == "layer_norm" else 1  # statistics of a row, and parameters

    def forward(x: Tensor, residual: Tensor | None, parameters: list[Tensor], eps: float) -> Normalized:
        width = x.shape[-1]
        count = x.numel() // width if width else 0
        total, y = None if residual is None else torch.empty_like(x), torch.empty_like(x)
        counters = library.column_counters(library.column_groups(count, width), width)
        statistics = x.new_empty(numbers * count + counters, dtype=torch.float32)
        sizes, made = (count, width), (total, y, counters, statistics)
        kind = (x.dtype, parameters[0].dtype)
        library.launch(f"{name}_forward", *kind, *sizes, x, residual, *parameters, eps, *made)
        return x if total is None else total, y, [statistics]

    def backward(
        x: Tensor,
        weight: Tensor,
        statistics: list[Tensor],
        grad: Tensor,
        grad_total: Tensor | None,
        more: int = 0,
    ) -> list[Tensor]:
        width, sets = x.shape[-1], numbers + more
        count = x.numel() // width if width else 0
        groups = library.column_groups(count, width)
        grad_x, grads = torch.empty_like(x), weight.new_empty(sets, width)
        partials = weight.new_empty(groups, sets, width, dtype=torch.float32)
        tensors = (x, weight, *statistics, grad, grad_total, grad_x, grads, partials)
        library.launch(f"{name}_backward", x.dtype, weight.dtype, count, width, groups, sets, *tensors)
        return [grad_x, *grads.unbind()]

    reads = lambda x, dtypes: dtypes in ({x}, {torch.float32})  # noqa: E731
    return NormKernel(forward, backward, reads, partial(backward, more=1))


def _of_a_sum(norm: Callable[..., Tensor]) -> Callable[..., Pair]:
    """A norm after torch's add: the norm of t = x + residual, and t."""

    @wraps(norm)
    def added(x: Tensor, residual: Tensor | None, *rest: object, included: Tensor | None = None) -> Pair:
        assert included is None, "kernels alone make gradients of such biases"
        total = x if residual is None else x + residual
        return norm(total, *rest), total

    return added


def of_sums(
    plain: Operator[Any], cuda: Callable[..., Pair], examples: Callable[[], Iterator[Example]]
) -> Operator[Callable[..., Pair]]:
    """The operator of a norm of a sum: `plain`'s implementations after an add, but for `cuda`, which adds."""
    own = {"cuda": cuda, "planned": planned(cuda).fn}
    rows = (replace(row, fn=own.get(row.name) or _of_a_sum(row.fn)) for row in plain.implementations)
    return Operator(f"add_{plain.name}", tuple(rows), examples=examples)


def check_residual(x: Tensor, residual: Tensor | None) -> None:
    """Raise ValueError unless a residual has x's shape and dtype."""
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"`residual` must have the shape and dtype of `x`, {list(x.shape)} of {x.dtype}, but is "
            f"{list(residual.shape)} of {residual.dtype}; convert one of them first."
        )


def norm_examples(name: str, vectors: int, rows: int) -> Callable[[], Iterator[Example]]:
    """Examples of a norm with that many parameters [h], or of `add_...`; the report's has `rows` of 1,024."""
    added, width = name.startswith("add_"), 1024

    def moves(dtype: torch.dtype) -> dict[str, int]:
        """Matrices: x and y; x and both gradients; for a sum also the residual, the sum and its gradient."""
        matrix, vector = rows * width * dtype.itemsize, width * dtype.itemsize
        statistics = rows * vectors * 4
        plain = name.removeprefix("add_")
        return {
            f"{plain}_forward": (4 if added else 2) * matrix + vectors * vector + statistics,
            f"{plain}_backward": (4 if added else 3) * matrix
            + vector
            + statistics
            + sums_moved(vectors * width)
            + vectors * vector,
        }

    def call(f: Callable[..., Tensor | Pair], *tensors: Tensor) -> Tensor | Pair:
        return f(*tensors, 1e-5)

    def examples() -> Iterator[Example]:
        for shape in ((3, 2, 5), (1, 1, 1), (131, 3, 67), (2, 0, 8), (rows, width)):
            inputs = (shape,) * (2 if added else 1) + ((shape[-1],),) * vectors
            large = shape == (rows, width)
            # One channel has no variance: of large numbers its result would be their rounding, magnified.
            for scale in (1.0, 1e4, 1e-4) if shape[-1] > 1 and not large else (1.0,):
                yield Example(
                    name if large else f"{shape} x {scale}",
                    inputs,
                    call,
                    (*[scale] * (2 if added else 1), *[1.0] * vectors),
                    traffic=Traffic(moves) if large else None,
                )

    return examples
