"""The kernels of quantization: bit for bit what the formulas and the CPU's kernel give."""

import math

import pytest
import torch

from megazero.ops.native import available
from megazero.ops.quantize import (
    CODE_FORMATS,
    Quantization,
    dequantize_cuda,
    dequantize_native_cpu,
    dequantize_reference,
    quantize_cuda,
    quantize_native_cpu,
    quantize_reference,
)
from tests.kernels.harness import DTYPES, in_every_order, same_bits, watched
from tests.kernels.updates import shifted
from tests.tables import over_table

KEYS = over_table("key", [None, 12345], ids=["nearest", "stochastic"])
KINDS = over_table("kind", CODE_FORMATS)


def random(rows, numel, dtype, seed=0):
    """Values of all magnitudes, some of them zero."""
    g = torch.Generator().manual_seed(1000 * rows + numel + seed)
    x = torch.randn(rows, numel, generator=g) * 10.0 ** torch.randint(-3, 3, (rows, numel), generator=g)
    return (x * (torch.rand(rows, numel, generator=g) > 0.1)).to(dtype)


def check(x, how, key=None, first=0):
    """Codes and what they stand for, in every dtype, are the reference's bits."""
    wanted = quantize_reference(x, how, key, first)
    if available():
        assert same_bits(wanted, quantize_native_cpu(x, how, key, first))
    (packed,) = in_every_order(lambda kernels: [quantize_cuda(x, how, key, first, kernels)])
    assert same_bits(packed, wanted), (tuple(x.shape), how)
    numel = x.shape[1]
    values = in_every_order(
        lambda kernels: [dequantize_cuda(packed, numel, how, dtype, kernels) for dtype in DTYPES]
    )
    for dtype, found in zip(DTYPES, values, strict=True):
        true = dequantize_reference(packed, numel, how, dtype)
        assert torch.equal(found.isnan(), true.isnan())
        # torch has several NaN of bf16; the kernels have one.
        assert same_bits(found[~found.isnan()], true[~true.isnan()]), (tuple(x.shape), how, dtype)
        if available():
            assert same_bits(found, dequantize_native_cpu(packed, numel, how, dtype))


@KINDS
@KEYS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_remainder(kind, key, dtype):
    for numel in range(1, 35):
        check(random(1 + numel % 3, numel, dtype), Quantization(kind, 8), key)


@KINDS
@KEYS
def test_every_way_to_share_a_block(kind, key):
    """2 to 32 lanes, which keep all of a block or read it twice; whole, ragged and lone blocks."""
    for block, numel in ((16, 250), (32, 97), (64, 130), (128, 257), (256, 1031), (264, 600)):
        for rows in (1, 2):
            check(random(rows, numel, torch.bfloat16), Quantization(kind, block), key)


@KINDS
@KEYS
@over_table("dtype", DTYPES, ids=str)
def test_extremes(kind, key, dtype):
    """Blocks that are not finite, of denormals, of zeros, of the largest, and at halves of codes."""
    info = torch.finfo(dtype)
    x = torch.ones(9, 24)
    x[0, 3], x[1, 9], x[2, 23] = math.inf, -math.inf, math.nan
    x[3] = torch.linspace(-info.tiny, info.tiny, 24)
    x[4] = torch.linspace(-3e-45, 3e-45, 24)
    x[5], x[5, 2] = 0.0, -0.0
    x[6] = torch.linspace(-1, 1, 24) * info.max
    x[7] = torch.arange(24) - 11.5
    x[8] = torch.tensor([448.0, *(2.0**-e for e in range(23))])
    check(x.to(dtype), Quantization(kind, 8), key)


@KINDS
def test_every_code(kind):
    """Each of the 256 bytes, or 16 halves, stands for what the formula says; fp8's two NaN are no codes."""
    how = Quantization(kind, 256)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127] if kind == "fp8" else codes
    numel = codes.numel() * 8 // how.format.bits
    scale = torch.full((how.blocks(numel),), 0.37).view(torch.uint8)
    packed = torch.cat([scale, codes, codes.new_zeros(-codes.numel() % 4)]).view(1, -1)
    (found,) = in_every_order(lambda kernels: [dequantize_cuda(packed, numel, how, torch.float32, kernels)])
    assert same_bits(found, dequantize_reference(packed, numel, how, torch.float32))


@KINDS
def test_nearest_of_many(kind):
    """Halves between codes and their neighbours in fp32: the scale is one."""
    largest = CODE_FORMATS[kind].largest
    grid = torch.linspace(-largest, largest, 2041)
    grid = torch.cat([grid, *(grid.nextafter(torch.tensor(side)) for side in (-math.inf, math.inf))])
    check(grid.clamp(-largest, largest).view(1, -1), Quantization(kind, 8192))


@KINDS
def test_numbers_of_a_stream(kind):
    """What is drawn depends on an element's number alone: beyond 2^32 too, and however rows are cut."""
    how, x = Quantization(kind, 8), random(4, 24, torch.float32)
    for first in (7, 2**32 - 5, 2**40 + 1):
        check(x, how, -3, first)
    (whole,) = in_every_order(lambda kernels: [quantize_cuda(x, how, 5, 100, kernels)])
    (half,) = in_every_order(lambda kernels: [quantize_cuda(x[2:], how, 5, 148, kernels)])
    assert same_bits(whole[2:], half)


@KINDS
@over_table("dtype", DTYPES, ids=str)
def test_memory_of_any_alignment(kind, dtype):
    how, x = Quantization(kind, 16), random(3, 40, dtype)
    check(shifted(x.view(-1), 1).view(3, 40), how)
    check(random(40, 3, dtype).t(), how, 9)
    packed = quantize_reference(x, how)
    apart = shifted(packed.view(-1), 1).view(packed.shape)
    (found,) = in_every_order(lambda kernels: [dequantize_cuda(apart, 40, how, dtype, kernels)])
    assert same_bits(found, dequantize_reference(packed, 40, how, dtype))


@pytest.mark.parametrize(("rows", "numel"), [(0, 24), (3, 0)])
def test_nothing(rows, numel):
    how = Quantization("int8", 8)
    packed = quantize_cuda(torch.ones(rows, numel), how, kernels=watched())
    assert packed.shape == (rows, how.row_bytes(numel))
    assert dequantize_cuda(packed, numel, how, torch.float32, watched()).shape == (rows, numel)
