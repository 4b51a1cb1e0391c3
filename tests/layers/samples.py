"""Layers as models make them."""

from __future__ import annotations

from megazero.config.tree.model import ModelConfig
from megazero.layers.attention import SelfAttention
from megazero.layers.mlp import MLP
from megazero.layers.placement import Placement
from megazero.layers.transformer import TransformerLayer
from megazero.spec.resolve import model_spec


def causal_layer(i: int, config: ModelConfig, placement: Placement, *, selective: bool = False):
    """A GPT's layer."""
    layer = model_spec(config).layers[i]
    attention = SelfAttention(i, layer.attention, placement, recompute=selective)
    return TransformerLayer(i, layer, placement, attention, MLP(f"layers.{i}.mlp", layer.mlp, placement))
