"""The layers of a model: which attention and which MLP each has, by the configuration and its number."""

from __future__ import annotations

from torch import nn

from megazero.config.derive import experts_of
from megazero.layers.attention import SelfAttention
from megazero.layers.latent import LatentAttention
from megazero.layers.mlp import MLP
from megazero.layers.transformer import TransformerLayer
from megazero.models.chunk import Slice
from megazero.moe.mlp import MoEMLP


def attention_of(number: int, held: Slice, *, causal: bool) -> nn.Module:
    """The attention of a layer."""
    again, place = held.recompute.again("core_attn"), (number, held.config, held.placement)
    if held.config.multi_latent_attention:
        made_again = held.recompute.again("mla_up_proj")
        return LatentAttention(*place, causal=causal, recompute=again, made_again=made_again)
    return SelfAttention(*place, causal=causal, recompute=again)


def mlp_of(number: int, held: Slice) -> nn.Module:
    """The MLP of a layer, or its experts."""
    place = (number, held.config, held.placement)
    if experts_of(held.config, number):
        return MoEMLP(*place, recompute=held.recompute)
    return MLP(*place, tiles=held.recompute.mlp_tiles)


def layer_of(number: int, held: Slice, *, causal: bool) -> TransformerLayer:
    """A layer with both."""
    attention, mlp = attention_of(number, held, causal=causal), mlp_of(number, held)
    return TransformerLayer(number, held.config, held.placement, attention, mlp, held.recompute)
