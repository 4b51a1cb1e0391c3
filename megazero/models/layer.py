"""The layers of a model: which attention and which MLP each has, as its spec says."""

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
    """The attention of a layer, or its state-space mixer; None without either."""
    again, attention = held.recompute.again("core_attn"), layer.attention
    if isinstance(attention, LatentAttentionSpec):
        made_again = held.recompute.again("mla_up_proj")
        return LatentAttention(number, attention, held.placement, recompute=again, made_again=made_again)
    if attention is not None:
        return SelfAttention(number, attention, held.placement, recompute=again)
    return None if layer.mixer is None else Mamba2(number, layer.mixer, held.placement, recompute=again)


def mlp_of(number: int, layer: LayerSpec, held: Slice) -> nn.Module | None:
    """The MLP of a layer, or its experts; None without either."""
    mlp = layer.mlp
    if mlp is None:
        return None
    if isinstance(mlp, MoeSpec):
        return MoEMLP(number, mlp, held.placement, recompute=held.recompute, ids=held.vocab[1])
    return MLP(f"layers.{number}.mlp", mlp, held.placement, tiles=held.recompute.mlp_tiles)


def kind_of(layer: LayerSpec) -> str:
    """The name of a layer's type: that of its part where it is one alone."""
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
    """A layer of a model, by its number."""
    layer = held.spec.every_layer[number]
    mixer, mlp = mixer_of(number, layer, held), mlp_of(number, layer, held)
    if mixer is None or mlp is None:
        return SingleLayer(number, layer, held.placement, mixer=mixer, mlp=mlp)
    return TransformerLayer(number, layer, held.placement, mixer, mlp, held.recompute)
