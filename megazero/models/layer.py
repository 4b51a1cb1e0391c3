"""Builds a layer of a model from its spec: its attention or mixer, and its MLP or experts."""

from __future__ import annotations

from torch import nn

from megazero.layers.attention import SelfAttention
from megazero.layers.latent import LatentAttention
from megazero.layers.mlp import MLP
from megazero.layers.state_space.layer import SingleLayer
from megazero.layers.state_space.mixer import Mamba2
from megazero.layers.transformer import TransformerLayer
from megazero.models.chunk import Slice
from megazero.moe.mlp import MoEMLP
from megazero.spec.experts import MoeSpec
from megazero.spec.model import LayerSpec
from megazero.spec.parts import LatentAttentionSpec


def mixer_of(number: int, layer: LayerSpec, held: Slice) -> nn.Module | None:
    """Build a layer's attention or state-space mixer; None if it has neither."""
    recompute, attention = held.recompute.again("core_attn"), layer.attention
    if isinstance(attention, LatentAttentionSpec):
        made_again = held.recompute.again("mla_up_proj")
        return LatentAttention(number, attention, held.placement, recompute=recompute, made_again=made_again)
    if attention is not None:
        return SelfAttention(number, attention, held.placement, recompute=recompute)
    return None if layer.mixer is None else Mamba2(number, layer.mixer, held.placement, recompute=recompute)


def mlp_of(number: int, layer: LayerSpec, held: Slice) -> nn.Module | None:
    """Build a layer's MLP or experts; None if it has neither."""
    mlp = layer.mlp
    if mlp is None:
        return None
    if isinstance(mlp, MoeSpec):
        return MoEMLP(number, mlp, held.placement, recompute=held.recompute, ids=held.vocab[1])
    return MLP(f"layers.{number}.mlp", mlp, held.placement, tiles=held.recompute.mlp_tiles)


def kind_of(layer: LayerSpec) -> str:
    """The name of a layer's type; a layer of a single part has the name of that part's type."""
    if layer.sides == 2:
        return TransformerLayer.__name__
    if layer.attention is not None:
        return SelfAttention.__name__
    if layer.mixer is not None:
        return Mamba2.__name__
    if layer.mlp is not None:
        return (MLP if layer.is_dense else MoEMLP).__name__
    return SingleLayer.__name__


def layer_of(number: int, held: Slice) -> TransformerLayer:
    """Build a layer of a model, by its number."""
    layer = held.spec.every_layer[number]
    mixer, mlp = mixer_of(number, layer, held), mlp_of(number, layer, held)
    if mixer is None or mlp is None:
        return SingleLayer(number, layer, held.placement, mixer=mixer, mlp=mlp)
    return TransformerLayer(number, layer, held.placement, mixer, mlp, held.recompute)
