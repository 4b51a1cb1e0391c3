"""The layers of a model: which attention and which MLP each has, by the configuration and its number."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from torch import nn

from megazero.config.derive import experts_of
from megazero.config.hybrid.settings import ATTENTION, DENSE, EXPERTS, MAMBA
from megazero.config.tree.model import ModelConfig
from megazero.layers.attention import SelfAttention
from megazero.layers.latent import LatentAttention
from megazero.layers.mlp import MLP
from megazero.layers.state_space.layer import SingleLayer
from megazero.layers.state_space.mixer import Mamba2
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
        return MoEMLP(*place, recompute=held.recompute, ids=held.vocab[1])
    return MLP(*place, tiles=held.recompute.mlp_tiles)


_KINDS: MappingProxyType[str, type[nn.Module]] = MappingProxyType(
    {MAMBA: Mamba2, ATTENTION: SelfAttention, DENSE: MLP, EXPERTS: MoEMLP, "": SingleLayer}
)
"""What each letter of a hybrid model's pattern stands for, and a layer without parts."""


def kind_of(model: ModelConfig, number: int) -> str:
    """The name of a layer's type: that of its part where it is one alone."""
    parts = model.parts_at(number)
    return TransformerLayer.__name__ if len(parts) > 1 else _KINDS[parts].__name__


def layer_of(number: int, held: Slice, *, causal: bool) -> TransformerLayer:
    """A layer with the parts that the configuration gives it, of the sizes that it gives it."""
    parts, held = held.config.parts_at(number), replace(held, config=held.config.at_layer(number))
    config, placement = held.config, held.placement
    mixer = attention_of(number, held, causal=causal) if ATTENTION in parts else None
    if MAMBA in parts:
        mixer = Mamba2(number, config, placement, recompute=held.recompute.again("core_attn"))
    mlp = mlp_of(number, held) if DENSE in parts or EXPERTS in parts else None
    if mixer is None or mlp is None:
        return SingleLayer(number, config, placement, mixer=mixer, mlp=mlp)
    return TransformerLayer(number, config, placement, mixer, mlp, held.recompute)
