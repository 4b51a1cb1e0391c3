"""Products with codes equal a literal float64 product on every path, and integers are exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megazero.inference.invariant import OrderedProduct
from megazero.ops import native
from megazero.ops.coded_linear import (
    CodedWeight,
    coded_linear,
    coded_linear_native_cpu,
    coded_linear_reference,
    coded_linear_torch,
)
from tests.tables import over_table

PATHS = ("BASELINE", "AVX2", "AVX512", "AVX512_VNNI")
SIZES = [(1, 8, 1, 4), (37, 20, 1, 8), (16, 64, 2, 4), (130, 384, 3, 4), (65, 1024, 8, 8), (48, 52, 1, 4)]
ROWS = (1, 2, 3, 5, 17, 64, 65)
compiled = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def weight_of(width: int, depth: int, groups: int, bits: int, rounds_inputs: bool = False) -> CodedWeight:
    generator = torch.Generator().manual_seed(width + depth)
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (width, depth), generator=generator)
    scales = torch.rand(width, groups, generator=generator) * 0.02 + 0.001
    return CodedWeight.of(codes.to(torch.int8), scales, bits, rounds_inputs)


def path_of(name: str):
    """The path, if this processor has it."""
    path = getattr(native.NATIVE.CodedPath, name)
    if path.value > native.NATIVE.coded_path().value:
        pytest.skip(f"the processor has no {name}")
    return path


def literal(codes, scales, x, bias, rounds_inputs: bool) -> np.ndarray:
    """The sums, one after another, in float64."""
    y = np.zeros((len(x), len(codes)))
    group = codes.shape[1] // scales.shape[1]
    for i, row in enumerate(x.astype(np.float64)):
        if rounds_inputs:
            own = np.float32(np.abs(x[i]).max()) / np.float32(127.5) or np.float32(1)
            row = np.clip(np.rint(x[i] / own), -128, 127).astype(np.float64) * own
        for j in range(len(codes)):
            total = bias[j]
            for k in range(codes.shape[1]):
                total += row[k] * codes[j, k] * scales[j, k // group]
            y[i, j] = total
    return y


@compiled
@pytest.mark.parametrize("name", PATHS)
@over_table("rounds", [False, True])
@over_table("sizes", [(19, 24, 3, 4), (33, 20, 1, 8), (16, 12, 1, 4)], ids=str)
def test_every_path_is_a_literal_product(name, rounds, sizes):
    if rounds and sizes[2] > 1:
        sizes = (*sizes[:2], 1, 8)
    path = path_of(name)
    weight = weight_of(*sizes[:3], 8 if rounds else sizes[3], rounds)
    codes, scales = weight.codes.numpy(), weight.row_scales.double().numpy()
    for rows in (1, 2, 5):
        x, bias = drawn(rows, sizes[1]), drawn(sizes[0])
        own = coded_linear_native_cpu(x, weight, bias, None, path).numpy()
        expected = literal(codes, scales, x.numpy(), bias.double().numpy(), rounds)
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(coded_linear_reference(x, weight, bias), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(coded_linear_torch(x, weight, bias), expected, rtol=1e-5, atol=1e-6)


@compiled
@pytest.mark.parametrize("name", PATHS)
@over_table("sizes", SIZES, ids=str)
@over_table("rounds", [False, True])
def test_any_rows_are_within_rounding_and_alike_among_any_others(name, sizes, rounds):
    """2e-6 of the sum of magnitudes, which is what fp32 sums in order of depth lose at these sizes."""
    path, (width, depth, groups, bits) = path_of(name), sizes
    weight = weight_of(width, depth, 1 if rounds else groups, 8 if rounds else bits, rounds)
    numbers, every = weight.dequantized().double(), drawn(max(ROWS), depth)
    for rows in ROWS:
        x = every[:rows].clone()
        own = coded_linear_native_cpu(x, weight, None, None, path)
        if rounds:
            scale = x.abs().amax(1, keepdim=True) / 127.5
            x = (x / scale).round().clamp(-128, 127).double() * scale.double()
        terms = x.double().abs() @ numbers.abs().t()
        assert bool(((own - x.double() @ numbers.t()).abs() <= 2e-6 * terms).all())
        last = coded_linear_native_cpu(every[rows - 1 : rows].clone(), weight, None, None, path)
        assert torch.equal(own[-1:], last)


@compiled
@over_table("sizes", SIZES, ids=str)
@over_table("threads", [1, 2])
def test_codes_have_the_bits_of_the_dequantized_weight(sizes, threads):
    """So a batch-invariant model answers as it would with floats."""
    weight, bias, before = weight_of(*sizes), drawn(sizes[0]), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in ROWS:
            x = drawn(rows, sizes[1])
            with torch.inference_mode():
                expected = OrderedProduct()(x, weight.dequantized(), bias)
            assert torch.equal(coded_linear(x, weight, bias), expected)
    finally:
        torch.set_num_threads(before)


@compiled
@over_table("bits", [4, 8])
@over_table("scale", [0.0, 1e-40, 2.0**-126, 2.0**-99, 2.0**-98, 1e30], ids=str)
def test_scales_as_small_and_large_as_floats_are_have_the_same_bits(bits, scale):
    """One row's kernels divide scales by a power of 2, which loses bits of scales below 2^-98."""
    weight = weight_of(70, 64, 2, bits)
    scales = weight.row_scales.clone()
    scales[3::5] = scale * 1.2345678
    weight, x = CodedWeight.of(weight.codes, scales, bits), drawn(1, 64) * 1e6
    with torch.inference_mode():
        expected = OrderedProduct()(x, weight.dequantized(), None)
    assert torch.equal(coded_linear(x, weight, None), expected)


@compiled
@pytest.mark.parametrize("name", PATHS)
@over_table("rows", [1, 2, 5])
@over_table(("code", "value"), [(127, 255.0), (-128, 255.0), (127, -255.0), (-128, -255.0)], ids=str)
def test_nothing_saturates(name, rows, code, value):
    """Products of bytes added in pairs of 16 bits would: 2 x 255 x 127 is beyond 32,767."""
    depth = 4096
    weight = CodedWeight.of(torch.full((33, depth), code, dtype=torch.int8), torch.ones(33, 1), 8, True)
    x = torch.full((rows, depth), value)
    x[:, 0] = -abs(value)  # a code of -128, and 127 where numbers are positive
    codes = torch.full((depth,), 127 if value > 0 else -128)
    codes[0] = -128
    total = int((codes * code).sum())
    own = coded_linear_native_cpu(x, weight, None, None, path_of(name))
    assert torch.equal(own, torch.full((rows, 33), 2.0 * total))


@compiled
def test_rows_of_zeros_and_rows_that_are_not_finite():
    weight = weight_of(5, 16, 1, 8, True)
    x = torch.cat([torch.zeros(1, 16), drawn(3, 16)])
    x[1, 3], x[2, 4] = torch.inf, torch.nan
    for fn in (coded_linear_native_cpu, coded_linear_reference, coded_linear_torch):
        y = fn(x, weight, None)
        assert torch.equal(y[0], torch.zeros(5))
        assert bool(y[1:3].isnan().all())
        assert bool(y[3].isfinite().all())


@compiled
def test_a_given_magnitude_is_that_of_whole_rows():
    weight, x = weight_of(5, 16, 1, 8, True), drawn(3, 16)
    whole = torch.cat([x, torch.full((3, 1), 9.0)], 1)
    scale = 9.0 / 127.5
    codes = (x / scale).round().double()
    expected = codes @ weight.codes.double().t() * scale * weight.row_scales.double().t()
    for fn in (coded_linear_native_cpu, coded_linear_reference, coded_linear_torch):
        assert torch.allclose(fn(x, weight, None, whole.abs().amax(1)).double(), expected, rtol=1e-6)


def test_codes_are_as_they_were_given():
    for width, depth, groups, bits in SIZES:
        codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (width, depth), dtype=torch.int8)
        scales = torch.rand(width, groups)
        weight = CodedWeight.of(codes, scales, bits)
        assert torch.equal(weight.codes, codes)
        assert torch.equal(weight.row_scales, scales)
    assert CodedWeight.of(torch.zeros(32, 1024, dtype=torch.int8), torch.ones(32, 8), 4).nbytes == (
        32 * 1024 // 2 + 32 * 8 * 4
    )
    # Groups of 12 are no whole words of 4 bits.
    assert CodedWeight.of(torch.zeros(32, 24, dtype=torch.int8), torch.ones(32, 2), 4).bits == 8


def test_bf16_is_rounded_once():
    weight, x = weight_of(37, 64, 2, 4), drawn(3, 64).bfloat16()
    exact = F.linear(x.float(), weight.dequantized())
    assert torch.equal(coded_linear(x, weight, None), exact.bfloat16())


@over_table(
    ("codes", "scales", "bits", "rounds", "says"),
    [
        ((4, 16), (3, 1), 8, False, "`scales` must be one for each group of a row of 4 rows of 16 codes"),
        ((4, 16), (4, 3), 8, False, "`scales` must be one for each group"),
        ((4, 18), (4, 3), 8, False, "`group` must be a multiple of 4, but is 6"),
        ((4, 16), (4, 2), 8, True, "of one scale for a row and at most 65536 inputs, but one of 8 bits, 2"),
        ((4, 16), (4, 1), 4, True, "codes of rounded inputs must meet a weight of 8 bits"),
        ((1, 65540), (1, 1), 8, True, "and 65540 inputs"),
    ],
)
def test_weights_that_are_none(codes, scales, bits, rounds, says):
    with pytest.raises(ValueError, match=says):
        CodedWeight.of(torch.zeros(codes, dtype=torch.int8), torch.ones(scales), bits, rounds)
