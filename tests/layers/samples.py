"""Layers as models make them."""

from __future__ import annotations

from megazero.config.tree.model import ModelConfig
from megazero.layers.attention import SelfAttention
from megazero.layers.mlp import MLP
from megazero.layers.placement import Placement
from megazero.layers.transformer import TransformerLayer


def causal_layer(i: int, config: ModelConfig, placement: Placement, *, selective: bool = False):
    """A GPT's layer."""
    attention = SelfAttention(i, config, placement, causal=True, recompute=selective)
    return TransformerLayer(i, config, placement, attention, MLP(i, config, placement))
