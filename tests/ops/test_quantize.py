"""Blockwise quantization: by hand, within its bounds, and the kernel bit for bit what the reference is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megazero.ops.native import available
from megazero.ops.quantize import CODE_FORMATS, DEQUANTIZE, QUANTIZE, Quantization, dequantize, quantize
from tests.tables import over_table

KINDS = tuple(CODE_FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEYS = over_table("key", [None, 12345], ids=["nearest", "stochastic"])
NATIVE = pytest.mark.skipif(not available(), reason="the compiled kernels are not built")


def back(x: Tensor, how: Quantization, key: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize(quantize(x, how, key), x.shape[1], how, dtype)


def random(rows: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values of all magnitudes: some blocks are a million times larger than others, some values are zero."""
    generator = torch.Generator().manual_seed(1000 * rows + numel + seed)
    x = torch.randn(rows, numel, generator=generator)
    x *= 10.0 ** torch.randint(-2, 3, (rows, numel), generator=generator)
    x *= 10.0 ** torch.randint(-2, 2, (rows, 1), generator=generator)
    return (x * (torch.rand(rows, numel, generator=generator) > 0.1)).to(dtype)


def largest_errors(x: Tensor, how: Quantization) -> Tensor:
    """For each element: the distance between codes there, times the scale."""
    wide = x.float()
    bounds = torch.empty_like(wide)
    for row, bound in zip(wide, bounds, strict=True):
        for start in range(0, len(row), how.block):
            magnitude = row[start : start + how.block].abs().max().item()
            for i, value in enumerate(row[start : start + how.block].tolist()):
                bound[start + i] = how.step(magnitude, value)
    return bounds


def test_by_hand():
    """Scales 127 / 127, 7 / 7 and 448 / 448 of a block each; halves go to the even code."""
    x = torch.tensor([[127.0, -3.5, 2.5, 0.4, 0.0, 0.0, 0.0, 0.0, 254.0, -1.0]])
    packed = quantize(x, Quantization("int8", 8))
    assert packed[:, :8].view(torch.float32).tolist() == [[1.0, 2.0]]
    assert packed[:, 8:].view(torch.int8).tolist() == [[127, -4, 2, 0, 0, 0, 0, 0, 127, 0, 0, 0]]
    packed = quantize(torch.tensor([[7.0, -3.5, 2.5, -7.0, 1.0]]), Quantization("int4", 8))
    assert packed[:, :4].view(torch.float32).tolist() == [[1.0]]
    assert packed[:, 4:].tolist() == [[0xC7, 0x92, 0x01, 0]]  # -4 7, -7 2, 1
    packed = quantize(torch.tensor([[448.0, -1.0, 17.0, 2.0**-9]]), Quantization("fp8", 8))
    assert packed[:, 4:].tolist() == [[0x7E, 0xB8, 0x58, 0x01]]
    assert dequantize(packed, 4, Quantization("fp8", 8), torch.float32).tolist() == [[448, -1, 16, 2**-9]]


def test_bytes_are_those_of_the_formula():
    for kind, bits in (("int8", 8), ("int4", 4), ("fp8", 8)):
        for block in (8, 256, 4096):
            for numel in (1, 7, 8, 9, 255, 256, 257, 4099):
                how = Quantization(kind, block)
                expected = 4 * math.ceil(numel / block) + 4 * math.ceil(numel * bits / 32)
                assert how.row_bytes(numel) == expected
                assert quantize(torch.ones(3, numel), how).shape == (3, expected)


@KEYS
@over_table("dtype", DTYPES, ids=str)
@over_table("kind", KINDS)
def test_a_round_trip_is_within_the_bound(kind, dtype, key):
    for rows, numel, block in ((1, 1, 8), (3, 67, 8), (2, 1031, 256), (5, 64, 64)):
        how, x = Quantization(kind, block), random(rows, numel, dtype)
        error = (back(x, how, key).double() - x.double()).abs()
        allowed = largest_errors(x, how).double() * (0.5 if key is None else 1.0)
        slack = x.double().abs().amax() * 2.0**-22
        assert (error <= allowed + slack).all(), (rows, numel, block)


@over_table("dtype", DTYPES, ids=str)
@over_table("kind", KINDS)
@KEYS
def test_nothing_is_clipped_and_zeros_stay(kind, dtype, key):
    """DeepSpeed's codes end below the positive maximum, by an eighth of it at 4 bits."""
    x = torch.zeros(2, 40, dtype=dtype)
    x[0, 3], x[0, 5] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    x[1, 9] = torch.finfo(dtype).tiny
    found = back(x, Quantization(kind, 16), key, dtype)
    torch.testing.assert_close(found, x, rtol=torch.finfo(dtype).eps, atol=0.0)
    assert found[x == 0].count_nonzero() == 0


@over_table("kind", KINDS)
@KEYS
def test_denormal_blocks_lose_less_than_the_smallest_step(kind, key):
    x = torch.tensor([[1e-45, -3e-39, 1e-38, 0.0, 5e-42]])
    error = (back(x, Quantization(kind, 8), key) - x).abs()
    assert (error <= 2.0**-126).all()


@over_table("bad", [math.inf, -math.inf, math.nan])
@over_table("dtype", DTYPES, ids=str)
@over_table("kind", KINDS)
@KEYS
def test_what_is_not_finite_stays_so_in_its_block_alone(kind, dtype, bad, key):
    x = torch.ones(2, 40, dtype=dtype)
    x[1, 18] = bad
    found = back(x, Quantization(kind, 16), key, dtype)
    wrong = torch.zeros(2, 40, dtype=torch.bool)
    wrong[1, 16:32] = True
    assert torch.equal(found.isnan(), wrong)
    assert (found[~wrong] == 1).all()


def sweep() -> list[tuple[Tensor, int]]:
    """Ragged sizes, and blocks of extremes, in which fp32 arithmetic has its corners."""
    cases = [(random(1, numel), 256) for numel in (1, 2, 3, 5, 31, 255, 256, 257, 513, 1031, 4096, 4099)]
    cases += [(random(rows, numel), 8) for rows in (2, 7) for numel in range(1, 34)]
    cases += [(random(3, 4099), 4096), (random(2, 300), 1000)]
    corners = [
        0.0,
        -0.0,
        1e-45,
        1e-38,
        2.0**-126,
        3.4e38,
        -3.4e38,
        1.0,
        0.5,
        2.0**-10,
        6e4,
        math.inf,
        math.nan,
    ]
    cases += [(torch.tensor(corners).repeat(2, 3).roll(shift, 1), 8) for shift in range(8)]
    halves = torch.arange(-512, 513).float() / 2  # every tie between codes, and fp8's between its finer ones
    cases += [
        (torch.cat([torch.tensor([largest]), halves * unit])[None], 2048)
        for largest in (127.0, 7.0, 448.0)
        for unit in (1.0, 2.0**-4, 2.0**-9, 2.0**-9 * (1 + 2.0**-20))
    ]
    return cases


@NATIVE
@KEYS
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_bit_for_bit_the_reference(kind, key):
    (packs, *_), (unpacks, *_) = QUANTIZE.implementations, DEQUANTIZE.implementations
    for x, block in sweep():
        how = Quantization(kind, block)
        for dtype in DTYPES:
            mine = x.to(dtype)
            expected = QUANTIZE.reference(mine, how, key, 77)
            found = packs.fn(mine, how, key, 77)
            assert torch.equal(found, expected), (x.shape, block, dtype)
            for out in DTYPES:
                theirs = DEQUANTIZE.reference(expected, x.shape[1], how, out)
                ours = unpacks.fn(expected, x.shape[1], how, out)
                assert ours.dtype == theirs.dtype == out
                torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


@NATIVE
def test_every_size_up_to_4099():
    flat = random(1, 4099)
    for numel in range(1, 4100):
        how = Quantization(KINDS[numel % 3], 8 * (1 + numel % 40))
        x = flat[:, :numel]
        found = quantize(x, how)
        assert torch.equal(found, QUANTIZE.reference(x, how))
        expected = DEQUANTIZE.reference(found, numel, how, torch.float32)
        assert torch.equal(dequantize(found, numel, how, torch.float32), expected)


def test_all_fp8_codes_come_back():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]
    values = codes.view(torch.float8_e4m3fn).float()
    how = Quantization("fp8", 256)
    packed = quantize(values[None], how)
    assert packed[:, :4].view(torch.float32).item() == 1.0
    assert torch.equal(packed[0, 4 : 4 + len(codes)], codes)
    assert torch.equal(dequantize(packed, len(codes), how, torch.float32)[0], values)


@over_table("kind", KINDS)
def test_chance_has_no_bias_and_depends_on_key_and_element_alone(kind):
    how, x = Quantization(kind, 64), random(1, 640, seed=3)
    tries = torch.stack([back(x, how, key) for key in range(400)])
    assert len({tuple(each.flatten().tolist()) for each in tries[:20]}) == 20
    # The mean of 400 is within five standard deviations, which are at most half a step each.
    allowed = 5 * 0.5 * largest_errors(x, how) / 20 + x.abs().max() * 1e-6
    assert ((tries.mean(0) - x).abs() <= allowed).all()
    # A part that begins with a block is rounded as within the whole.
    whole, part = quantize(x, how, 7), quantize(x[:, 128:], how, 7, first=128)
    assert torch.equal(
        dequantize(part, 512, how, torch.float32), dequantize(whole, 640, how, torch.float32)[:, 128:]
    )


@NATIVE
def test_threads_change_nothing():
    before, found = torch.get_num_threads(), []
    x = random(3, 40_009)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            found.append(quantize(x, Quantization("int4", 256), 5))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*found)


def test_meta_tensors_pass():
    how = Quantization("int4", 8)
    packed = quantize(torch.empty(2, 9, device="meta"), how, 5)
    assert (packed.shape, packed.device.type) == ((2, how.row_bytes(9)), "meta")
    assert dequantize(packed, 9, how, torch.bfloat16).shape == (2, 9)


@over_table(
    ("kind", "block", "message"),
    [
        ("int3", 8, "`kind` must be one of int8, int4, fp8, but is 'int3'"),
        ("int8", 12, "`block` must be a multiple of 8, but is 12"),
        ("int8", 0, "`block` must be a multiple of 8, but is 0"),
    ],
)
def test_what_cannot_be_is_refused(kind, block, message):
    with pytest.raises(ValueError, match=message):
        Quantization(kind, block)
