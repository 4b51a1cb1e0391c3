"""Parts of a layer that backward computes again: the same bits, and the bytes that are kept less."""

from __future__ import annotations

import torch

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import Module, RecomputeConfig
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.models.chunk import Slice
from megazero.models.layer import layer_of
from megazero.mpu.context import solo_context
from megazero.spec.resolve import model_spec
from tests.layers.live_bytes import LiveBytes
from tests.tables import over_table

S, B, H, F = 12, 2, 16, 40
WHOLE = 4 * S * B * H  # bytes of hidden states
INNER = 4 * S * B * F
CHOICES = 2  # experts of a token
DENSE = ModelConfig(
    num_layers=2,
    hidden_size=H,
    num_attention_heads=4,
    seq_length=S,
    ffn_hidden_size=F,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    activation="swiglu",
    add_bias_linear=False,
)
MIXED = DENSE.model_copy(
    update={
        **{"num_experts": (4,), "moe_router_topk": CHOICES, "moe_ffn_hidden_size": F},
        "moe_shared_expert_intermediate_size": F,
    }
)


def passes(config: ModelConfig, *modules: Module) -> tuple[int, list[torch.Tensor]]:
    """The bytes that a layer keeps between forward and backward, and all gradients."""
    chosen = RecomputeConfig(granularity="selective" if modules else "none", modules=modules)
    context = solo_context()
    layer = layer_of(0, Slice(model_spec(config), (8, 8), Placement.of(context, torch.float32), chosen))
    initialize(layer, 3, context.place)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with LiveBytes() as live:
        out, _ = layer(x, LayerInputs(Rows(range(S))))
        kept = live.total
    out.square().sum().backward()
    return kept, [x.grad, *(p.grad for p in layer.parameters())]


def saved(config: ModelConfig, *modules: Module) -> int:
    """The bytes that the layer keeps less; its gradients are the same bits."""
    (before, expected), (after, grads) = passes(config), passes(config, *modules)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    return before - after


@over_table("normalization", ["LayerNorm", "RMSNorm"])
@over_table("position", ["input", "both"])
def test_norms_are_forgotten_once_they_are_used(normalization, position):
    config = DENSE.model_copy(update={"normalization": normalization, "norm_position": position})
    assert saved(config, "layernorm") == 2 * WHOLE


def test_an_mlp_keeps_its_input_alone():
    """Of SwiGLU's two halves and their product nothing stays; with its norm, neither does its input.

    Nor do a mean and a variance of each row, which the norm makes again with the MLP.
    """
    assert saved(DENSE, "mlp") == 3 * INNER
    statistics = 2 * 4 * S * B
    assert saved(DENSE, "mlp", "layernorm") == 3 * INNER + 2 * WHOLE + statistics


def test_experts_forget_their_activations():
    assert saved(MIXED, "moe_act") == CHOICES * INNER
    plain, relu = (MIXED.model_copy(update={"activation": name}) for name in ("gelu", "relu"))
    assert saved(relu, "moe_act") == saved(plain, "moe_act") > 0
    assert saved(MIXED, "shared_experts") == 3 * INNER


def test_a_mixture_keeps_its_input_alone():
    """Which holds for all of it, so it keeps less than with its parts by themselves."""
    parts = saved(MIXED, "moe_act", "shared_experts", "layernorm")
    assert saved(MIXED, "moe", "layernorm") > parts > saved(MIXED, "moe_act", "shared_experts")


def test_the_core_of_attention_is_one_of_several():
    """Its share is that of `--recompute-activations`, and nothing else is computed again with it."""
    alone = saved(DENSE, "core_attn")
    assert alone > 0
    assert saved(DENSE, "core_attn", "mlp") == alone + 3 * INNER
