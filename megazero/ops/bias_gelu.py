"""GELU of x + bias (Hendrycks & Gimpel 2016)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import compute_dtype
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels, planned
from megazero.ops.dispatch import CallFacts, Implementation, Operator, kinds_of_calls
from megazero.ops.example import Example, Traffic, sums_moved
from megazero.ops.included import handed
from megazero.ops.native import NATIVE, address, on_native_cpu, rows_of


@dataclass(frozen=True)
class GeluFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        exact: whether the erf form is used, rather than the tanh form.
        mixed: whether the bias has a different dtype from x.
    """

    exact: bool
    mixed: bool


def bias_gelu_reference(x: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """z/2 (1 + erf(z / sqrt 2)) if exact, else z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))."""
    z = x if bias is None else x + bias
    wide = z.to(compute_dtype(z.dtype))
    if exact:
        gate = torch.erf(wide / math.sqrt(2))
    else:
        gate = torch.tanh(math.sqrt(2 / math.pi) * wide * (1 + 0.044715 * wide.square()))
    return (wide / 2 * (1 + gate)).to(z.dtype)


@dataclass(frozen=True)
class GeluKernel:
    """One pass over contiguous memory each way, with the bias in fp32 or None.

    Attributes:
        forward: x, the bias and whether backward sums -> the result, and what its sums need, or None.
        backward: x, the bias, what the sums need and the gradient of the result -> the gradient of x and, if
            it sums, the sum of that over rows.
    """

    forward: Callable[[Tensor, Tensor | None, bool], tuple[Tensor, Tensor | None]]
    backward: Callable[[Tensor, Tensor | None, Tensor | None, Tensor], tuple[Tensor, Tensor | None]]


_Ctx = Context[tuple[GeluKernel, bool]]


class _BiasGELU(torch.autograd.Function):
    """The activation, which saves only its inputs. A bias is added to x, or x contains it already."""

    @staticmethod
    def forward(
        ctx: _Ctx, x: Tensor, bias: Tensor | None, kernel: GeluKernel, included: Tensor | None = None
    ) -> Tensor:
        x = x.contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        y, needed = kernel.forward(x, wide_bias, bias is not None or included is not None)
        ctx.save_for_backward(x, wide_bias, needed)
        ctx.kept = kernel, included is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        (x, bias, needed), (kernel, included) = ctx.saved_tensors, ctx.kept
        grad_x, summed = kernel.backward(x, bias, needed, grad.contiguous())
        return (grad_x, None, None, summed) if included else (grad_x, summed, None, None)


def _native_forward(x: Tensor, bias: Tensor | None, sums: bool) -> tuple[Tensor, None]:
    y = torch.empty_like(x)
    NATIVE.bias_gelu_forward(rows_of(x, x.shape[-1]), address(x), address(bias), address(y))
    return y, None


def _native_backward(
    x: Tensor, bias: Tensor | None, needed: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    grad_x = torch.empty_like(x)
    NATIVE.bias_gelu_backward(rows_of(x, x.shape[-1]), *map(address, (x, bias, grad, grad_x)))
    # torch adds bf16 up in fp32 and rounds once.
    return grad_x, None if bias is None else grad_x.view(-1, x.shape[-1]).sum(0)


def _on_gpu(library: KernelLibrary, exact: bool) -> GeluKernel:
    """The kernels for GPUs, which sum in fp32 and in a fixed order, and round once."""

    def forward(x: Tensor, bias: Tensor | None, sums: bool) -> tuple[Tensor, Tensor | None]:
        y, width = torch.empty_like(x), x.shape[-1]
        count = x.numel() // width if width else 0
        counted, counters = 0, None
        if sums:
            counted = library.column_counters(library.column_groups(count, width), width)
            counters = x.new_empty(counted, dtype=torch.int32)
        tensors = (x, bias, y, counted, counters)
        library.launch("bias_gelu_forward", x.dtype, int(exact), count, width, *tensors)
        return y, counters

    def backward(
        x: Tensor, bias: Tensor | None, counters: Tensor | None, grad: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        grad_x, width = torch.empty_like(x), x.shape[-1]
        count = x.numel() // width if width else 0
        groups, summed, partials = 0, None, None
        if counters is not None:
            groups = library.column_groups(count, width)
            summed, partials = x.new_empty(width), x.new_empty(groups, width, dtype=torch.float32)
        tensors = (x, bias, grad, grad_x, summed, partials, counters)
        library.launch("bias_gelu_backward", x.dtype, int(exact), count, width, groups, *tensors)
        return grad_x, summed

    return GeluKernel(forward, backward)


_NATIVE = GeluKernel(_native_forward, _native_backward)


def bias_gelu_native_cpu(x: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """The tanh form of gelu(x + bias) on CPU, for x [..., f] and bias [f] of one dtype, fp32 or bf16."""
    assert not exact
    return apply(_BiasGELU, x, bias, _NATIVE)


def bias_gelu_cuda(
    x: Tensor,
    bias: Tensor | None,
    exact: bool,
    included: Tensor | None = None,
    kernels: KernelLibrary | None = None,
) -> Tensor:
    """gelu(x + bias) on a GPU for x [..., f] and a bias [f] of one dtype: fp32, fp16 or bf16."""
    library = kernels or cuda_kernels()
    passes = library.once(("bias_gelu", exact), lambda: _on_gpu(library, exact))
    return apply(_BiasGELU, x, bias, passes, included)


def bias_gelu_torch(x: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """gelu(x + bias) by torch's own operators, in two passes."""
    z = x if bias is None else x + bias
    return F.gelu(z, approximate="none" if exact else "tanh")


def _examples() -> Iterator[Example]:
    for shape in ((3, 5), (1, 1), (257, 2, 33), (0, 4)):
        for scale in (1.0, 60.0):
            label = f"{shape} x {scale}"
            for exact in (False, True):
                call = lambda f, x, bias, exact=exact: f(x, bias, exact)  # noqa: E731
                own = {"exact": exact, "mixed": False}
                yield Example(f"{label} {exact=}", (shape, shape[-1:]), call, (scale, 1.0), own)
            plain = {"exact": False, "mixed": False}
            yield Example(f"{label} no bias", (shape,), lambda f, x: f(x, None, False), scale, plain)

    rows, width = 96, 1024

    def summed(dtype: torch.dtype) -> int:
        return sums_moved(width) + width * dtype.itemsize

    def moves(
        dtype: torch.dtype, vector: int = width * 4, summed: Callable[[torch.dtype], int] = summed
    ) -> dict[str, int]:
        """x and y; x and both gradients; and partial sums of the bias's."""
        matrix = rows * width * dtype.itemsize
        return {
            "bias_gelu_forward": 2 * matrix + vector,
            "bias_gelu_backward": 3 * matrix + vector + summed(dtype),
        }

    with_bias, without = lambda f, x, bias: f(x, bias, False), lambda f, x: f(x, None, False)
    yield Example("bias_gelu", ((rows, width), (width,)), with_bias, traffic=Traffic(moves))
    yield Example(
        "gelu", ((rows, width),), without, traffic=Traffic(lambda dtype: moves(dtype, 0, lambda _: 0))
    )


BIAS_GELU: Operator[Callable[[Tensor, Tensor | None, bool], Tensor]] = Operator(
    "bias_gelu",
    (
        Implementation("native_cpu", bias_gelu_native_cpu, on_native_cpu(exact=False, mixed=False)),
        Implementation("cuda", bias_gelu_cuda, on_cuda_kernels(mixed=False)),
        planned(bias_gelu_cuda, mixed=False),
        Implementation("torch", bias_gelu_torch),
        Implementation("reference", bias_gelu_reference),
    ),
    kinds_of_calls(GeluFacts, exact=(False, True), mixed=(False, True)),
    _examples,
)


def bias_gelu(x: Tensor, bias: Tensor | None, exact: bool = False, included: Tensor | None = None) -> Tensor:
    """gelu(x + bias) for x [..., f] and bias [f] or None; the tanh form unless `exact`.

    `included` is a bias [f] that x contains already; backward computes its gradient too.
    """
    facts = GeluFacts.of(x, exact=exact, mixed=bias is not None and bias.dtype != x.dtype)
    row = BIAS_GELU.choose(facts)
    if included is None:
        return row.fn(x, bias, exact)
    x, included = handed(row, x, included)
    return row.fn(x, bias, exact, **({} if included is None else {"included": included}))
