"""Blockwise quantization to int8, int4 and fp8, for communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.counter_random import MASK_64, hash_uniform, mix_64, signed_64
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import TRAINING_FLOATS, CallFacts, Implementation, Operator
from megazero.ops.example import Example, Traffic
from megazero.ops.native import NATIVE, NATIVE_DTYPES, address, on_native_cpu, rows_of
from megazero.ops.segments import readable

_LARGEST_FP32 = torch.finfo(torch.float32).max
SMALLEST_SCALE = 2.0**-126
"""Scales are no smaller than the smallest normal fp32, so that a quotient by them is as exact as any."""


class CodeFormat(NamedTuple):
    """One kind of code: a number of the kernel's, the bits it takes, and the largest magnitude it holds."""

    number: int
    bits: int
    largest: float


CODE_FORMATS = MappingProxyType(
    {
        "int8": CodeFormat(0, 8, 127.0),
        "int4": CodeFormat(1, 4, 7.0),
        "fp8": CodeFormat(2, 8, 448.0),  # e4m3: 4 bits of exponent, 3 of significand, no infinity
    }
)


@dataclass(frozen=True)
class Quantization:
    """Symmetric quantization of blocks (ZeRO++, Wang et al. 2023, block-based; Dettmers et al. 2022).

    A block's scale is its largest magnitude divided by the largest code, and at least 2^-126. Codes are
    quotients by the scale, rounded. int4 codes take half a byte each.

    Attributes:
        kind: ``int8``, ``int4`` or ``fp8`` (e4m3).
        block: elements that share a scale, a multiple of 8; the last block of a row may be shorter.
    """

    kind: str
    block: int = 256

    def __post_init__(self) -> None:
        if self.kind not in CODE_FORMATS:
            known = ", ".join(CODE_FORMATS)
            raise ValueError(f"`kind` must be one of {known}, but is {self.kind!r}; choose one of them")
        if self.block < 1 or self.block % 8:
            raise ValueError(f"`block` must be a multiple of 8, but is {self.block}; choose one such as 256")

    @property
    def format(self) -> CodeFormat:
        """The kind of code."""
        return CODE_FORMATS[self.kind]

    def blocks(self, numel: int) -> int:
        """Number of blocks of a row of `numel` elements."""
        return -(-numel // self.block)

    def row_bytes(self, numel: int) -> int:
        """Bytes of a quantized row of `numel` elements: 4 (ceil(numel / block) + ceil(numel bits / 32)).

        First the fp32 scales, then the codes, filled up with zeros so that the next row is aligned.
        """
        return 4 * (self.blocks(numel) + -(-numel * self.format.bits // 32))

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes alone, without what fills them up."""
        return -(-numel * self.format.bits // 8)

    def step(self, magnitude: float, value: float = 0.0) -> float:
        """The largest distance between neighbouring codes, times the scale, at a value of a block.

        Rounding to nearest changes the value by at most half of it, stochastic rounding by less than all of
        it; to which fp32 arithmetic adds no more than 2^-22 of `magnitude`.

        Args:
            magnitude: the largest magnitude in the block.
            value: the value; only fp8's steps depend on it.
        """
        scale = max(magnitude / self.format.largest, SMALLEST_SCALE)
        return max(abs(value) / 8, scale * 2.0**-9) if self.kind == "fp8" else scale


@torch.no_grad()
def quantize_reference(x: Tensor, how: Quantization, key: int | None = None, first: int = 0) -> Tensor:
    """``scale = max |x| / largest`` and ``code = round(x / scale)``, block by block."""
    rows, numel = x.shape
    blocks, largest = how.blocks(numel), how.format.largest
    filled = F.pad(x.float(), (0, blocks * how.block - numel)).view(rows, blocks, how.block)
    greatest = filled.abs().amax(-1)
    scales = (greatest / largest).clamp_min_(SMALLEST_SCALE)
    bad = ~greatest.isfinite()
    scales = scales.masked_fill_(bad, torch.nan)
    quotients = (filled / scales.unsqueeze(-1)).masked_fill_(bad.unsqueeze(-1), 0.0)
    quotients = quotients.view(rows, -1)[:, :numel]
    if key is not None:
        index = torch.arange(first, first + x.numel(), device=x.device).view(rows, numel)
        quotients = _round_stochastically(quotients, hash_uniform(key, index), how)
    codes = _codes(quotients.clamp_(-largest, largest), how)
    filling = how.row_bytes(numel) - 4 * blocks - codes.shape[1]
    return torch.cat([scales.view(torch.uint8), F.pad(codes, (0, filling))], 1)


@torch.no_grad()
def dequantize_reference(packed: Tensor, numel: int, how: Quantization, dtype: torch.dtype) -> Tensor:
    """``x = code * scale``, where no product of finite numbers becomes infinite by rounding."""
    rows, blocks = packed.shape[0], how.blocks(numel)
    scales = packed[:, : 4 * blocks].contiguous().view(torch.float32)
    codes = packed[:, 4 * blocks : 4 * blocks + how.code_bytes(numel)]
    values = F.pad(_values(codes, how)[:, :numel], (0, blocks * how.block - numel))
    x = values.view(rows, blocks, how.block) * scales.unsqueeze(-1)
    return x.clamp_(-_LARGEST_FP32, _LARGEST_FP32).view(rows, -1)[:, :numel].to(dtype).contiguous()


def _round_stochastically(quotients: Tensor, uniform: Tensor, how: Quantization) -> Tensor:
    """Round up with a probability equal to the distance from the code below, in units of a code's spacing."""
    unit = _fp8_units(quotients) if how.kind == "fp8" else quotients.new_ones(())
    whole = quotients / unit
    below = whole.floor()
    return (below + (uniform < whole - below)) * unit


def _fp8_units(quotients: Tensor) -> Tensor:
    """The distance between neighbouring fp8 numbers around each quotient: 2^(exponent - 3), at least 2^-9."""
    exponents = ((quotients.view(torch.int32) >> 23) & 255).clamp_min_(127 - 6)
    return ((exponents - 3) << 23).view(torch.float32)


def _codes(quotients: Tensor, how: Quantization) -> Tensor:
    """uint8 codes [rows, code bytes]; an even element is the low half of its byte."""
    if how.kind == "fp8":
        return quotients.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = quotients.round().to(torch.int8)
    if how.kind == "int8":
        return codes.view(torch.uint8)
    halves = F.pad(codes & 15, (0, codes.shape[1] % 2)).view(codes.shape[0], -1, 2)
    return (halves[..., 0] | (halves[..., 1] << 4)).view(torch.uint8)


def _values(codes: Tensor, how: Quantization) -> Tensor:
    """The numbers that the codes stand for, float32, in units of the scale."""
    if how.kind == "fp8":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    if how.kind == "int8":
        return codes.contiguous().view(torch.int8).float()
    halves = torch.stack([codes & 15, codes >> 4], -1).view(codes.shape[0], -1).to(torch.int8)
    return ((halves ^ 8) - 8).float()


def _stream_start(key: int | None) -> int:
    """The start of the key's stream of random bits, as kernels take it; 0 without a key."""
    return 0 if key is None else signed_64(mix_64(key & MASK_64))


@torch.no_grad()
def quantize_cuda(
    x: Tensor,
    how: Quantization,
    key: int | None = None,
    first: int = 0,
    kernels: KernelLibrary | None = None,
) -> Tensor:
    """Quantize in one pass over memory that is not in cache."""
    rows, numel = x.shape
    wide = readable(x)
    packed = x.new_empty(rows, how.row_bytes(numel), dtype=torch.uint8)
    sizes = (rows, numel, how.block, how.format.number)
    rounding = (key is not None, _stream_start(key), first)
    (kernels or cuda_kernels()).launch("quantize", wide.dtype, *sizes, *rounding, wide, packed)
    return packed


@torch.no_grad()
def dequantize_cuda(
    packed: Tensor,
    numel: int,
    how: Quantization,
    dtype: torch.dtype,
    kernels: KernelLibrary | None = None,
) -> Tensor:
    """Dequantize in one pass over memory; rows that do not lie on a multiple of 4 bytes are copied first."""
    packed = packed.contiguous()
    packed = packed.clone() if packed.data_ptr() % 4 else packed
    rows = packed.shape[0]
    x = packed.new_empty(rows, numel, dtype=dtype)
    sizes = (rows, numel, how.block, how.format.number)
    (kernels or cuda_kernels()).launch("dequantize", dtype, *sizes, packed, x)
    return x


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
        _stream_start(key),
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


def _examples(kernel: str, call: Callable[..., Tensor]) -> Iterator[Example]:
    """Examples of bf16, as `call` makes them of a quantization: x, and rows of scales and codes."""
    rows, width = 12, 8192
    for kind in CODE_FORMATS:
        how = Quantization(kind)
        yield Example(
            f"quantize {kind}",
            ((rows, width),),
            partial(call, how),
            traffic=Traffic(partial(_moves, kernel, how, rows, width), {"": torch.bfloat16}),
        )


def _moves(kernel: str, how: Quantization, rows: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    return {kernel: rows * (how.row_bytes(width) + width * dtype.itemsize)}


def _quantized(how: Quantization, f: Callable[..., Tensor], x: Tensor) -> Tensor:
    return f(x, how, 1)


def _dequantized(how: Quantization, f: Callable[..., Tensor], x: Tensor) -> Tensor:
    return f(quantize_reference(x, how, 1), x.shape[1], how, x.dtype)


_SERVED = on_native_cpu(TRAINING_FLOATS)

QUANTIZE: Operator[Callable[[Tensor, Quantization, int | None, int], Tensor]] = Operator(
    "quantize",
    (
        Implementation("native_cpu", quantize_native_cpu, _SERVED),
        Implementation("cuda", quantize_cuda, on_cuda_kernels()),
        Implementation("reference", quantize_reference),
    ),
    examples=partial(_examples, "quantize", _quantized),
    differentiable=False,
)

DEQUANTIZE: Operator[Callable[[Tensor, int, Quantization, torch.dtype], Tensor]] = Operator(
    "dequantize",
    (
        Implementation("native_cpu", dequantize_native_cpu, _SERVED),
        Implementation("cuda", dequantize_cuda, on_cuda_kernels()),
        Implementation("reference", dequantize_reference),
    ),
    examples=partial(_examples, "dequantize", _dequantized),
    differentiable=False,
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
