"""The layers of a model: which attention and which MLP each has, by the configuration and its number."""

from __future__ import annotations

from torch import nn

from megazero.config.derive import experts_of
from megazero.config.tree.hybrid import EXPERTS, MAMBA, MLP as DENSE
from megazero.layers.attention import SelfAttention
from megazero.layers.mlp import MLP
from megazero.layers.state_space.layer import SingleLayer
from megazero.layers.state_space.mixer import Mamba2
from megazero.layers.transformer import TransformerLayer
from megazero.models.chunk import Slice
from megazero.moe.mlp import MoEMLP


def attention_of(number: int, held: Slice, *, causal: bool) -> nn.Module:
    """The attention of a layer."""
    selective = held.recompute.granularity == "selective"
    return SelfAttention(number, held.config, held.placement, causal=causal, recompute=selective)


def mlp_of(number: int, held: Slice) -> nn.Module:
    """The MLP of a layer, or its experts."""
    kind = MoEMLP if experts_of(held.config, number) else MLP
    return kind(number, held.config, held.placement, tiles=held.recompute.mlp_tiles)


def layer_of(number: int, held: Slice, *, causal: bool) -> TransformerLayer:
    """A layer with both; in a hybrid model, with the one that the pattern names."""
    kinds = held.config.layer_kinds
    if kinds is None:
        attention, mlp = attention_of(number, held, causal=causal), mlp_of(number, held)
        return TransformerLayer(number, held.config, held.placement, attention, mlp)
    if kinds[number] in (DENSE, EXPERTS):
        return SingleLayer(number, held.config, held.placement, mlp=mlp_of(number, held))
    selective = held.recompute.granularity == "selective"
    mixer = (
        Mamba2(number, held.config, held.placement, recompute=selective)
        if kinds[number] == MAMBA
        else attention_of(number, held, causal=causal)
    )
    return SingleLayer(number, held.config, held.placement, mixer=mixer)
