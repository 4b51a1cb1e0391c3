"""The kernel of 8-bit casts: bit for bit the formula's codes, their transpose, and the largest magnitude."""

import math

import pytest
import torch

from megazero.ops.to_fp8 import FORMATS, to_fp8_cuda, to_fp8_reference
from tests.kernels.harness import DTYPES, in_every_order, same_bits, watched
from tests.kernels.updates import shifted

E4M3, E5M2 = FORMATS
ALL = pytest.mark.parametrize("dtype", DTYPES, ids=str)
KINDS = pytest.mark.parametrize("kind", FORMATS, ids=str)


def random(rows, width, dtype):
    """Values of all magnitudes that a format has, and some beyond."""
    g = torch.Generator().manual_seed(1000 * rows + width)
    x = torch.randn(rows, width, generator=g) * 2.0 ** torch.randint(-22, 18, (rows, width), generator=g)
    return x.clamp(-6e4, 6e4).to(dtype)


def check(x, kind, scale=1.0, before=0.0):
    """With and without the transpose and the amax."""
    scale = torch.tensor(scale)
    wanted_amax = torch.tensor(before)
    wanted, _ = to_fp8_reference(x, scale, kind, wanted_amax, False)

    def run(kernels):
        amax = torch.tensor(before)
        codes, turned = to_fp8_cuda(x, scale, kind, amax, True, kernels)
        plain, nothing = to_fp8_cuda(x, scale, kind, None, False, kernels)
        assert nothing is None
        return codes.view(torch.uint8), turned.view(torch.uint8), plain.view(torch.uint8), amax.view(1)

    codes, turned, plain, amax = in_every_order(run)
    assert turned.shape == x.shape[::-1]
    assert torch.equal(turned.t(), codes)
    assert torch.equal(plain, codes)
    assert torch.equal(amax[0], wanted_amax) or (amax.isnan() and wanted_amax.isnan())
    codes = codes.view(kind)
    assert torch.equal(codes.float().isnan(), wanted.float().isnan())
    numbers = ~wanted.float().isnan()  # NaN has two codes or more, and only one of the kernel's
    assert same_bits(codes[numbers], wanted[numbers]), (tuple(x.shape), kind)


@ALL
@KINDS
def test_every_remainder(kind, dtype):
    for width in (*range(1, 10), 15, 16, 17, 63, 64, 65, 130):
        for rows in (1, 2, 3, 4, 5, 64, 66):
            check(random(rows, width, dtype), kind, 0.37)


@pytest.mark.slow
@KINDS
def test_more_tiles_than_blocks(kind):
    """A block goes on to further tiles; the amax is in the last of them."""
    x = torch.zeros(1, 64 * 2200, dtype=torch.bfloat16)
    x[0, -1] = -3.0
    check(x, kind)


@KINDS
def test_every_code_and_the_halves_between_them(kind):
    codes = torch.arange(256, dtype=torch.uint8).view(kind).float()
    numbers = codes[codes.isfinite()].sort().values
    halves = (numbers[1:] + numbers[:-1]) / 2
    grid = torch.cat([numbers, halves])
    grid = torch.cat([grid, *(grid.nextafter(torch.tensor(side)) for side in (-math.inf, math.inf))])
    check(grid.view(1, -1), kind)
    check(grid.view(-1, 1), kind)


@ALL
@KINDS
def test_extremes(kind, dtype):
    """What is not finite, denormal, zero of both signs, or too large, alone and beside plain numbers."""
    info = torch.finfo(dtype)
    x = torch.ones(6, 12)
    x[0, 3], x[1, 4], x[2, 5] = math.inf, -math.inf, math.nan
    x[3] = torch.linspace(-1, 1, 12) * info.max
    x[4] = torch.linspace(-info.tiny, info.tiny, 12)
    x[5], x[5, 1] = 0.0, -0.0
    for rows in (x, *x.split(1)):
        for scale in (1.0, 2.0**-10, 3e38):
            check(rows.to(dtype), kind, scale)


@KINDS
def test_zeros_note_nothing_and_a_larger_amax_stays(kind):
    check(torch.zeros(5, 8), kind)
    check(torch.ones(5, 8), kind, before=3.5)
    check(torch.ones(5, 8), kind, before=math.inf)
    check(torch.ones(5, 8), kind, before=math.nan)


@ALL
def test_memory_of_any_alignment(dtype):
    x = random(8, 40, dtype)
    check(shifted(x.view(-1), 1).view(8, 40), E4M3)
    check(random(40, 8, dtype).t(), E5M2)


def test_nothing():
    amax = torch.tensor(2.0)
    codes, turned = to_fp8_cuda(torch.ones(0, 4), torch.ones(()), E4M3, amax, True, watched())
    assert (codes.shape, turned.shape, amax.item()) == ((0, 4), (4, 0), 2.0)
