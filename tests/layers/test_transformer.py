"""What attention adds is normalized by one operator with the add, where nothing lies between."""

from __future__ import annotations

import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.mpu.context import solo_context
from megazero.mpu.rng import sample_keys
from megazero.ops.dropout import Dropout
from tests.layers.samples import causal_layer

S, B, H = 6, 2, 16
KEYS = torch.from_numpy(sample_keys(5, range(B)))


def make_layer(**changes):
    sizes = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 4, "seq_length": S}
    config = ModelConfig(**sizes, attention_dropout=0.0, **{"hidden_dropout": 0.0, **changes})
    context = solo_context()
    layer = causal_layer(0, config, Placement.of(context, torch.float32))
    initialize(layer, 3, context.place)
    return layer


def residuals_given(layer, inputs: LayerInputs, x: torch.Tensor) -> int:
    """How many residuals the layer's second norm is given."""
    given = []
    layer.mlp_norm.register_forward_pre_hook(lambda module, args: given.append(len(args) - 1))
    layer(x, inputs)
    return sum(given)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("after_norm", [False, True])
def test_it_is_an_add_and_a_norm_bit_for_bit(normalization: str, after_norm: bool) -> None:
    layer = make_layer(
        add_bias_linear=False,
        normalization=normalization,
        apply_residual_connection_post_layernorm=after_norm,
    )
    inputs = LayerInputs(Rows(range(S)), branch_scale=0.5)
    results = []
    for together in (True, False):
        x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if together:
            out, _ = layer(x, inputs)
        else:
            normed = layer.input_norm(x)
            total = layer.attention(normed, inputs)[0] * 0.5 + (normed if after_norm else x)
            normed = layer.mlp_norm(total)
            out = (normed if after_norm else total) + layer.mlp(normed, inputs)[0] * 0.5
        leaves = [x, *layer.parameters()]
        results.append(
            [out, *torch.autograd.grad(out, leaves, torch.cos(torch.arange(out.numel())).view_as(out))]
        )
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_bias_or_dropout_comes_between() -> None:
    x, inputs = torch.randn(S, B, H), LayerInputs(Rows(range(S), keys=KEYS))
    assert residuals_given(make_layer(add_bias_linear=False), inputs, x) == 1
    biased = make_layer(add_bias_linear=False)
    biased.attention.register_forward_hook(lambda module, args, results: (results[0], torch.ones(H)))
    assert residuals_given(biased, inputs, x) == 0
    dropping = make_layer(add_bias_linear=False, hidden_dropout=0.1)
    assert isinstance(inputs.layer_dropout(0.1, dropping.sites["attention_out"]), Dropout)
    assert residuals_given(dropping, inputs, x) == 0
    assert residuals_given(dropping, LayerInputs(Rows(range(S))), x) == 1
