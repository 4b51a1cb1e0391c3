"""Quantizing and dequantizing rows of blocks, as the formulas read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.ops.counter_random import hash_uniform
from megazero.ops.quantize.scheme import SMALLEST_SCALE, Quantization

LARGEST_FP32 = torch.finfo(torch.float32).max


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
    return x.clamp_(-LARGEST_FP32, LARGEST_FP32).view(rows, -1)[:, :numel].to(dtype).contiguous()


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
