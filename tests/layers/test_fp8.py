"""8-bit products: the formats' rounding, the scales, and what law 1 becomes with them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megazero.config.tree.precision import PrecisionConfig
from megazero.layers.fp8 import Fp8Recipe, Fp8Scaling, Fp8State, fp8_linear, fp8_product, to_fp8
from megazero.mpu.solo_group import SoloGroup
from megazero.verify.run import run_in_threads
from tests.layouts.layout import Layout

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(())


def rounded(value: float, digits: int, lowest: int, largest: float) -> float:
    """To so many binary digits after the first, half to even, with subnormals below 2^lowest."""
    if value == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))), lowest)
    step = 2.0 ** (exponent - digits)
    return max(-largest, min(largest, round(value / step) * step))


@pytest.mark.parametrize(
    ("dtype", "digits", "lowest", "largest"), [(E4M3, 3, -6, 448.0), (E5M2, 2, -14, 57344.0)]
)
def test_rounding_is_that_of_the_format(dtype, digits, lowest, largest):
    values = torch.cat([torch.randn(500) * 2.0**k for k in range(-18, 18, 3)])
    values = torch.cat([values, torch.tensor([0.0, 448.0, 449.0, 1e9, -1e9, 57344.0, 2.0**-9, 1.0625])])
    wanted = [rounded(value, digits, lowest, largest) for value in values.tolist()]
    assert to_fp8(values, ONE, dtype).float().tolist() == wanted


def test_what_is_not_finite_stays_visible():
    """A limit alone would turn infinity into a number, and the loss scaler would see no overflow."""
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    assert to_fp8(values, ONE, E4M3).float().isnan().tolist() == [True, True, True, False]


def test_a_product_is_exact_in_its_codes():
    a, b = (torch.randn(rows, 5).to(E4M3) for rows in (3, 4))
    wanted = (a.double() @ b.double().t()) / (2.0 * 8.0)
    found = fp8_product(a, b, torch.tensor(2.0), torch.tensor(8.0), torch.float32)
    assert torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_torch_multiplies_the_same_numbers():
    a, b = torch.randn(16, 32).to(E5M2), torch.randn(48, 32).to(E4M3)
    scales = torch.tensor(0.5), torch.tensor(0.25)
    found = torch._scaled_mm(a, b.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)
    wanted = fp8_product(a, b, *(each.reciprocal() for each in scales), torch.bfloat16)
    assert torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=1e-6)


def scaling_of(**values):
    recipe = Fp8Recipe.of(PrecisionConfig(fp8_format="hybrid", **values))
    return Fp8Scaling("x", recipe, SoloGroup(), True, torch.device("cpu"))


def test_a_tensors_own_scale_takes_its_amax_to_the_largest_number():
    scaling = scaling_of(fp8_recipe="tensorwise", fp8_margin=1)
    x, w = torch.tensor([-7.0, 1.0]), torch.tensor([0.0, 0.0])
    assert [each.item() for each in scaling.forward(x, w)] == [448 / 7 / 2, 1.0]
    assert scaling.backward(torch.tensor([3.5])).item() == 57344 / 3.5 / 2
    assert scaling.backward(torch.tensor([math.inf])).item() == 1.0
    assert scaling.backward(torch.tensor([1e-39])).item() == torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("algorithm", "scales"), [("most_recent", [224.0, 112.0, 448.0]), ("max", [224.0, 112.0, 112.0])]
)
def test_a_delayed_scale_is_that_of_earlier_steps(algorithm, scales):
    scaling = scaling_of(fp8_amax_history_len=2, fp8_amax_compute_algo=algorithm)
    state, found = Fp8State([scaling], SoloGroup()), []
    for amaxes in ([1.0, 2.0], [4.0], [1.0]):  # of the micro-batches of three steps
        before = scaling.scale[0].item()
        for amax in amaxes:
            assert scaling.forward(torch.tensor([amax]), torch.ones(1))[0].item() == before
        state.advance()
        found.append(scaling.scale[0].item())
    assert found == scales
    assert scaling.scale[2].item() == 1.0  # no gradient has been seen
    assert scaling.history.shape == (2, 3)


def test_an_infinite_amax_keeps_the_scale():
    scaling = scaling_of()
    state = Fp8State([scaling], SoloGroup())
    for amax in (2.0, math.inf):
        scaling.forward(torch.tensor([amax]), torch.ones(1))
        state.advance()
    assert scaling.scale[0].item() == 224.0


def test_gradients_are_those_of_the_products():
    """With codes that hold their tensors exactly, forward and backward are a linear layer's."""
    scaling = scaling_of(fp8_recipe="tensorwise")
    x = torch.randint(-4, 5, (6, 2, 8)).float().requires_grad_()
    weight = torch.nn.Parameter(torch.randint(-4, 5, (3, 5, 8)).float())
    bias = torch.nn.Parameter(torch.randn(3, 5))
    for tensor in (x.data, weight.data):
        tensor.view(-1)[0] = 7.0  # amaxes that make the scales powers of two
    grad = torch.randint(-3, 4, (6, 2, 15)).float()
    grad.view(-1)[0] = 7.0
    y = fp8_linear(scaling, x, weight, bias, SoloGroup(), False)
    assert torch.equal(y, torch.nn.functional.linear(x, weight.flatten(0, 1), bias.flatten()))
    y.backward(grad)
    codes = (grad * (57344 / 7)).to(E5M2).float() / (57344 / 7)
    assert torch.allclose(x.grad, codes @ weight.detach().flatten(0, 1), atol=1e-4)
    wanted = (codes.flatten(0, 1).t() @ x.detach().flatten(0, 1)).view_as(weight)
    assert torch.allclose(weight.grad, wanted, atol=1e-4)
    assert torch.equal(bias.grad, grad.sum((0, 1)).view(3, 5))


def test_an_evaluation_notes_nothing():
    scaling = scaling_of()
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with torch.no_grad():
        fp8_linear(scaling, torch.ones(1, 1, 3), weight, None, SoloGroup(), False)
    assert scaling.amax.tolist() == [0.0, 0.0, 0.0]


def test_layers_at_the_ends_may_stay_out():
    values = {"fp8_format": "e4m3", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}
    assert PrecisionConfig(**values).layers_in_16_bits(6) == {0, 4, 5}
    assert PrecisionConfig(fp8_format="e4m3").layers_in_16_bits(6) == set()
    assert PrecisionConfig().layers_in_16_bits(2) == {0, 1}


BASE = Layout(samples=4)
SAME = (
    Layout(tp=2, sequence_parallel=True, zero=1),
    Layout(tp=2, pp=2),
    Layout(dp=2, zero=3, recompute="full"),
)


def trained(layout):
    return run_in_threads(layout.config(3), layout.grid, 3)


@pytest.fixture(scope="module")
def alone():
    return {each: trained(replace(BASE, fp8=each))[0] for each in ("tensorwise", "delayed")}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("layout", [*SAME, Layout(micro_batch=4)], ids=lambda layout: layout.name)
def test_a_layout_trains_like_one_process(alone, layout, recipe):
    """The amax of a tensor in parts is that of the whole. `tensorwise` alone depends on the micro-batch."""
    if layout.micro_batch > 1 and recipe == "tensorwise":
        pytest.skip("a scale is that of a micro-batch")
    wanted = alone[recipe]
    for found in trained(replace(layout, fp8=recipe, samples=4)):
        for mine, its in zip(found.losses, wanted.losses, strict=True):
            assert mine["lm loss"] == pytest.approx(its["lm loss"], abs=1e-5)
        for mine, its in zip(found.gradients, wanted.gradients, strict=True):
            for name in mine.keys() & its.keys():
                difference, size = (mine[name] - its[name]).norm(), its[name].norm()
                assert difference <= 2e-3 * size + 1e-6, name


def test_it_learns_nearly_what_wide_products_do(alone):
    wide = trained(BASE)[0].losses
    for record in alone.values():
        differences = [abs(a["lm loss"] - b["lm loss"]) for a, b in zip(record.losses, wide, strict=True)]
        assert 1e-5 < max(differences) < 0.02
