"""Layers of one part: wanted rows, shapes without memory, what recompute drops, initial values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.layers.state_space.initial import log_rates, steps, taps
from megazero.models.chunk import Slice
from megazero.models.layer import layer_of
from megazero.mpu.context import solo_context
from megazero.ops.attention import Documents
from megazero.spec.resolve import model_spec
from tests.tables import over_table

S, B = 70, 2  # more than a chunk of rows
CONFIG = ModelConfig(
    hybrid_layer_pattern="M*-",
    hidden_size=16,
    num_attention_heads=4,
    seq_length=S,
    mamba_state_dim=6,
    mamba_head_dim=4,
    mamba_num_groups=2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
WANTED = torch.tensor([[3, 0], [69, 12], [4, 63]])


def layer(number: int, *, selective: bool = False, device: str = "cpu"):
    context = solo_context()
    placement = replace(Placement.of(context, torch.float32), device=torch.device(device))
    recompute = RecomputeConfig(granularity="selective" if selective else "none")
    built = layer_of(number, Slice(model_spec(CONFIG), (8, 8), placement, recompute))
    initialize(built, 3, context.place)
    return built


def inputs() -> LayerInputs:
    ids = torch.zeros(B, S, dtype=torch.int32)
    ids[0, 60:] = 1
    return LayerInputs(Rows(range(S), Documents(ids)))


@over_table("number", range(3))
def test_wanted_rows_are_those_of_the_whole(number):
    torch.manual_seed(0)
    x = torch.randn(S, B, 16)
    built = layer(number)
    whole, _ = built(x, inputs())
    some, _ = built(x, replace(inputs(), wanted=WANTED))
    torch.testing.assert_close(some, whole[WANTED, torch.arange(B)])


@over_table("number", range(3))
def test_it_has_shapes_without_memory(number):
    x = torch.empty(S, B, 16, device="meta", requires_grad=True)
    out, _ = layer(number, device="meta")(x, LayerInputs(Rows(range(S))))
    out.sum().backward()
    assert out.shape == x.grad.shape == (S, B, 16)


def kept(selective: bool) -> tuple[int, list[Tensor]]:
    """Elements that autograd keeps of a mixer, and the gradients of its parameters."""
    torch.manual_seed(1)
    x, built, elements = torch.randn(S, B, 16), layer(0, selective=selective), {}

    def pack(tensor: Tensor) -> Tensor:
        elements[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, _ = built(x, inputs())
    out.square().sum().backward()
    return sum(elements.values()), [p.grad for p in built.parameters()]


def test_selective_recompute_drops_what_is_between_the_projections():
    (all_of_it, plain), (less, again) = kept(False), kept(True)
    assert less < all_of_it / 5
    for ours, theirs in zip(again, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_initial_values_have_the_fields_distributions():
    torch.manual_seed(2)
    drawn = torch.randn(100_000)

    def quantiles(values: Tensor) -> list[float]:
        return torch.quantile(values, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])).tolist()

    rates = quantiles(log_rates(drawn).exp())
    assert rates == pytest.approx([1, 4.75, 8.5, 12.25, 16], abs=0.1)
    lengths = quantiles(torch.nn.functional.softplus(steps(drawn)).log10())
    assert lengths == pytest.approx([-3, -2.5, -2, -1.5, -1], abs=0.02)
    assert quantiles(taps(drawn)) == pytest.approx([-0.5, -0.25, 0, 0.25, 0.5], abs=0.01)
    extremes = torch.tensor([-40.0, 40.0])
    assert all(made(extremes).isfinite().all() for made in (taps, log_rates, steps))
    assert math.isclose(log_rates(extremes)[1].item(), math.log(16), rel_tol=1e-6)
