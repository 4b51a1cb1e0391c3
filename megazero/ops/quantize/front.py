"""The public functions and their tables of implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, TRAINING_FLOATS, CallFacts, Implementation, Operator, where
from megazero.ops.native import NATIVE, NATIVE_DTYPES, address, available, rows_of
from megazero.ops.quantize.cuda import dequantize_cuda, quantize_cuda, stream_start
from megazero.ops.quantize.reference import dequantize_reference, quantize_reference
from megazero.ops.quantize.scheme import Quantization


@torch.no_grad()
def quantize_native_cpu(x: Tensor, how: Quantization, key: int | None = None, first: int = 0) -> Tensor:
    """The compiled kernel of csrc/quantize: one pass over memory that is not in cache."""
    wide = (x if x.dtype in NATIVE_DTYPES else x.float()).contiguous()
    rows, numel = x.shape
    packed = torch.empty(rows, how.row_bytes(numel), dtype=torch.uint8)
    NATIVE.quantize_rows(
        rows_of(wide, numel, rows),
        address(wide),
        address(packed),
        how.format.number,
        how.block,
        key is not None,
        stream_start(key),
        first,
    )
    return packed


@torch.no_grad()
def dequantize_native_cpu(packed: Tensor, numel: int, how: Quantization, dtype: torch.dtype) -> Tensor:
    """The compiled kernel of csrc/quantize."""
    packed = packed.contiguous()
    x = torch.empty(packed.shape[0], numel, dtype=dtype if dtype in NATIVE_DTYPES else torch.float32)
    rows = rows_of(x, numel, packed.shape[0])
    NATIVE.dequantize_rows(rows, address(packed), address(x), how.format.number, how.block)
    return x.to(dtype)


_SERVED = where(CPU, TRAINING_FLOATS, available)

QUANTIZE: Operator[Callable[[Tensor, Quantization, int | None, int], Tensor]] = Operator(
    "quantize",
    (
        Implementation("native_cpu", quantize_native_cpu, _SERVED),
        Implementation("cuda", quantize_cuda, on_cuda_kernels()),
        Implementation("reference", quantize_reference),
    ),
)

DEQUANTIZE: Operator[Callable[[Tensor, int, Quantization, torch.dtype], Tensor]] = Operator(
    "dequantize",
    (
        Implementation("native_cpu", dequantize_native_cpu, _SERVED),
        Implementation("cuda", dequantize_cuda, on_cuda_kernels()),
        Implementation("reference", dequantize_reference),
    ),
)


def quantize(x: Tensor, how: Quantization, key: int | None = None, first: int = 0) -> Tensor:
    """Scales and codes of each row of `x`, as bytes.

    A block with an infinity or a NaN gets NaN as its scale, so that all of it is NaN when it is dequantized:
    a gradient that is not finite stays so. Zeros stay zeros, and a code stands for each block's largest
    magnitude itself, so nothing is clipped.

    Args:
        x: floats [rows, numel], at least one in a row.
        how: the kind of codes, and the size of blocks.
        key: rounds stochastically with the random bits of this key (`counter_random.hash_uniform`), without
            bias; None rounds to the nearest code, ties to even.
        first: the number of the first element, counted over all rows; an element's random bits are a function
            of the key and its number, so a part of a tensor is rounded as within the whole.

    Returns:
        uint8 [rows, how.row_bytes(numel)] on the device of `x`.
    """
    return QUANTIZE.choose(CallFacts.of(x)).fn(x, how, key, first)


def dequantize(packed: Tensor, numel: int, how: Quantization, dtype: torch.dtype) -> Tensor:
    """The numbers that the codes stand for; `Quantization.step` bounds their error.

    Args:
        packed: the result of `quantize`, or rows of it.
        numel: the number of elements of a row.
        how: the quantization that made the codes.
        dtype: the dtype of the result.

    Returns:
        [rows, numel] on the device of `packed`.
    """
    return DEQUANTIZE.choose(CallFacts(packed.device.type, dtype)).fn(packed, numel, how, dtype)
