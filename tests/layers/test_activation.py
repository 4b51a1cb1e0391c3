"""Activations by name, and xIELU by its formula."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from megazero.config.tree.transformer import Activation
from megazero.layers.activation import activation_of
from megazero.layers.initialize import initialize
from megazero.layers.mlp import MLP
from megazero.layers.placement import Placement
from megazero.mpu.context import solo_context
from megazero.mpu.param_spec import spec_of
from megazero.spec.parts import ActivationSpec, MlpSpec, StreamSpec
from tests.tables import over_table


@over_table("name", get_args(Activation))
def test_each_name_is_made(name):
    spec = ActivationSpec(name)
    made = activation_of(spec, "a", Placement.of(solo_context(), torch.float32))
    x = torch.randn(3, 2, 8)
    assert made(x, None).shape == ((3, 2, 4) if spec.gated else (3, 2, 8))


def xielu(dtype=torch.float64) -> MLP:
    stream = StreamSpec(4, 0.02, 0.02)
    placement = Placement.of(solo_context(), dtype)
    mlp = MLP("layers.0.mlp", MlpSpec(stream, 8, ActivationSpec("xielu")), placement)
    initialize(mlp, 1, placement.place)
    return mlp


def test_xielu_by_its_formula():
    """p x^2 + x / 2 above 0, n (exp(x) - 1 - x) + x / 2 below; both slopes begin at 0.8."""
    act = xielu().activation
    assert {spec_of(p).name: (spec_of(p).shape, spec_of(p).weight_decay) for p in act.parameters()} == {
        "layers.0.mlp.activation.alpha_p": ((1,), False),
        "layers.0.mlp.activation.alpha_n": ((1,), False),
    }
    expected = [0.8 * 4 + 1, 0.0, 0.8 * (math.exp(-1) - 1 + 1) - 0.5, 0.8 * (-1 + 800) - 400]
    found = act(torch.tensor([2.0, 0.0, -1.0, -800.0], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=2e-6)
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: act(x), (x, act.alpha_p, act.alpha_n))


def test_xielu_is_that_of_transformers():
    activations = pytest.importorskip("transformers.activations")
    theirs = activations.XIELUActivation(dtype=torch.float32)
    x = torch.linspace(-6, 6, 301)
    torch.testing.assert_close(
        xielu(torch.float32).activation(x), theirs._xielu_python(x), rtol=1e-6, atol=1e-6
    )
