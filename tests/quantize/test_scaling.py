"""Scales of inputs: what comes before undoes them, and they are those of the papers."""

from __future__ import annotations

import pytest
import torch

from megazero.models.batch import Batch
from megazero.mpu.param_spec import spec_of
from megazero.quantize.grid import Grid
from megazero.quantize.rtn import nearest, squared_error
from megazero.quantize.scaling import activity_scale, folds_of, smooth_scale
from tests.inference.samples import GPT2, LLAMA, LLAMA_FOUR_GROUPS, build
from tests.tables import over_table

TOKENS = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(1))
NORMS = {"attention.qkv", "mlp.up"}
LESS_1 = LLAMA.model_copy(update={"apply_layernorm_1p": True})
ALL_HEADS = LLAMA_FOUR_GROUPS.model_copy(update={"add_bias_linear": True})
MODELS = {
    "layer norms and biases": (GPT2, NORMS | {"attention.out"}),
    "grouped keys, gates": (LLAMA, NORMS | {"mlp.down"}),
    "norms stored less 1": (LESS_1, NORMS | {"mlp.down"}),
    "all heads, biases, gates": (ALL_HEADS, NORMS | {"attention.out", "mlp.down"}),
    "clamped gates": (LLAMA.model_copy(update={"activation_func_clamp_value": 7.0}), NORMS),
    "residual after the norm": (
        GPT2.model_copy(update={"apply_residual_connection_post_layernorm": True}),
        {"attention.out"},
    ),
    "experts": (LLAMA.model_copy(update={"num_experts": (4,)}), {"attention.qkv"}),
}


@over_table("name", MODELS)
@torch.no_grad()
def test_a_layer_computes_the_same_with_scaled_inputs(name):
    settings, expected = MODELS[name]
    model = build(settings)
    generator = torch.Generator().manual_seed(4)
    for weight in model.parameters():  # biases and norms are not zeros and ones
        weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    before = model(Batch(TOKENS))
    folds = folds_of(model.layers[0], model.spec.layers[0])
    assert {fold.removeprefix("layers.0.").removesuffix(".weight") for fold in folds} == expected
    weights = {spec_of(weight).name: weight for weight in model.layers[0].parameters()}
    for weight, fold in folds.items():
        scale = torch.rand(weights[weight].shape[-1], dtype=torch.float64, generator=generator) + 0.5
        weights[weight].mul_(scale)
        fold(scale, Grid(8, None), {})
    torch.testing.assert_close(model(Batch(TOKENS)), before, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_codes_stay_where_only_the_scales_of_rows_change():
    model = build(ALL_HEADS)
    layer, spec = model.layers[0], model.spec.layers[0]
    qkv, grid = layer.attention.qkv.weight, Grid(4, 8)
    coded = {"layers.0.attention.qkv.weight": nearest(qkv.flatten(0, -2), grid)}
    codes, scales = next(iter(coded.values())).codes, next(iter(coded.values())).scales
    qkv.copy_(next(iter(coded.values())).dequantized().view_as(qkv))
    values = qkv[:, -1].clone()
    folds_of(layer, spec)["layers.0.attention.out.weight"](torch.full((32,), 2.0).double(), grid, coded)
    now = coded["layers.0.attention.qkv.weight"]
    assert torch.equal(now.codes, codes)
    assert torch.equal(qkv[:, -1], values / 2)
    assert torch.equal(now.scales.view(4, 3, 8, -1)[:, :2], scales.view(4, 3, 8, -1)[:, :2])
    assert torch.equal(now.dequantized().view_as(qkv), qkv)


def inputs(columns: int = 32) -> torch.Tensor:
    x = torch.randn(200, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    x[:, 3] *= 40.0
    return x


def test_the_scale_of_awq_is_the_best_power_of_the_mean():
    x, grid = inputs(), Grid(4, 8, torch.float64)
    weight = torch.randn(24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    scale = activity_scale(weight, x.abs().mean(0), x.t() @ x, grid)
    errors = {}
    for step in range(20):
        power = x.abs().mean(0) ** (step / 20)
        power = (power / (power.max() * power.min()) ** 0.5).clamp(min=1e-4)
        out = x @ (nearest(weight * power, grid).dequantized() / power - weight).t()
        errors[step] = (out.square().sum().item(), power)
    best = min(errors, key=lambda step: errors[step][0])
    assert best > 0
    torch.testing.assert_close(scale, errors[best][1])
    assert errors[best][0] < 0.8 * squared_error(nearest(weight, grid).dequantized() - weight, x.t() @ x)


def test_no_scale_is_taken_where_none_is_better():
    weight = torch.randint(-7, 8, (8, 16), dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    weight[:, ::8] = -8.0  # on the grid, with the scale 16/15: rounding is what it is
    ones = torch.ones(16, dtype=torch.float64)
    assert activity_scale(weight, ones, torch.eye(16, dtype=torch.float64), Grid(4, 8)) is None


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_scale_of_smoothquant(strength):
    x, weight = inputs(4), torch.tensor([[2.0, 0.0, -8.0, 1.0], [0.5, 0.0, 4.0, 3.0]], dtype=torch.float64)
    x[:, 2] = 0.0
    scale = smooth_scale(weight, x.abs().amax(0), strength)
    most = x.abs().amax(0)
    expected = [
        most[0] ** strength / 2.0 ** (1 - strength),
        most[1] ** strength / 1e-5 ** (1 - strength),
        1.0,
    ]
    torch.testing.assert_close(scale[:3].tolist(), [float(value) for value in expected])
