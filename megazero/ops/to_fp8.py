"""Matrices as 8-bit floats (Micikevicius et al. 2022), and the magnitudes that scales are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic

LARGEST = MappingProxyType({torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0})
"""The largest number of each format."""
FORMATS = tuple(LARGEST)

_Cast = Callable[[Tensor, Tensor, torch.dtype, Tensor | None, bool], tuple[Tensor, Tensor | None]]


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of x, a float32 scalar on its device; NaN if x has one."""
    largest: Tensor = torch.linalg.vector_norm(x.detach(), torch.inf)
    return largest.float()


def to_fp8_reference(
    x: Tensor, scale: Tensor, dtype: torch.dtype, noted: Tensor | None, turned: bool
) -> tuple[Tensor, Tensor | None]:
    """``round(clamp(x scale))``, and the maximum of `noted` and the amax of x."""
    if noted is not None:
        noted.copy_(torch.maximum(noted, amax(x)))
    wide, limit = x.float() * scale, LARGEST[dtype]
    # A difference of equals is 0, but NaN of infinities, which the limit would hide from the loss scaler.
    codes = (wide.clamp(-limit, limit) + (wide - wide)).to(dtype)
    return codes, codes.t().contiguous() if turned else None


def to_fp8_cuda(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    noted: Tensor | None,
    turned: bool,
    kernels: KernelLibrary | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One launch that reads x once."""
    x, (rows, width) = x.contiguous(), x.shape
    codes = x.new_empty(rows, width, dtype=dtype)
    columns = x.new_empty(width, rows, dtype=dtype) if turned else None
    tensors = (x, scale, noted, codes, columns)
    (kernels or cuda_kernels()).launch("to_fp8", x.dtype, rows, width, FORMATS.index(dtype), *tensors)
    return codes, columns


def _examples() -> Iterator[Example]:
    rows, width = 128, 1024

    def call(f: _Cast, x: Tensor, *, turned: bool) -> Tensor:
        return f(
            x, x.new_ones((), dtype=torch.float32), FORMATS[0], x.new_zeros((), dtype=torch.float32), turned
        )[0]

    for turned in (False, True):
        must = lambda dtype, turned=turned: {"to_fp8": rows * width * (dtype.itemsize + 1 + turned)}  # noqa: E731
        label = "to_fp8 turned" if turned else "to_fp8"
        yield Example(label, ((rows, width),), partial(call, turned=turned), traffic=Traffic(must))


TO_FP8: Operator[_Cast] = Operator(
    "to_fp8",
    (
        Implementation("cuda", to_fp8_cuda, on_cuda_kernels()),
        Implementation("reference", to_fp8_reference),
    ),
    examples=_examples,
    differentiable=False,
)


_SCHEMA = "(Tensor x, Tensor scale, int number, Tensor(a!)? noted, bool turned) -> (Tensor, Tensor)"


@torch.library.custom_op("megazero::to_fp8", mutates_args={"noted"}, schema=_SCHEMA)
def _opaque(
    x: Tensor, scale: Tensor, number: int, noted: Tensor | None, turned: bool
) -> tuple[Tensor, Tensor]:
    """The cast as torch.compile sees it: one call that it does not look into."""
    codes, columns = TO_FP8.choose(CallFacts.of(x)).fn(x, scale, FORMATS[number], noted, turned)
    return codes, x.new_empty(0, dtype=codes.dtype) if columns is None else columns


@_opaque.register_fake
def _shapes(
    x: Tensor, scale: Tensor, number: int, noted: Tensor | None, turned: bool
) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=FORMATS[number])
    return codes, x.new_empty(x.shape[::-1] if turned else (0,), dtype=FORMATS[number])


def to_fp8(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, noted: Tensor | None = None, turned: bool = False
) -> tuple[Tensor, Tensor | None]:
    """x times `scale`, rounded to `dtype`. It has no gradient.

    A value that is too large becomes the largest number of `dtype`; inf and NaN become NaN.

    Args:
        x: [rows, width], not empty.
        scale: a float32 scalar on x's device.
        dtype: a key of `LARGEST`.
        noted: a float32 scalar that becomes the largest magnitude of what it was and of x, before `scale`.
        turned: whether the transpose is wanted, too.

    Returns:
        The codes [rows, width], and with `turned` the same in memory as [width, rows].
    """
    if torch.compiler.is_compiling():
        codes, columns = _opaque(x, scale, FORMATS.index(dtype), noted, turned)
        return codes, columns if turned else None
    return TO_FP8.choose(CallFacts.of(x)).fn(x, scale, dtype, noted, turned)
