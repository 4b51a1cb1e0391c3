"""Latent attention in the section `model`: keys and values compressed to one vector (DeepSeek-V2)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from megazero.config.condition import here, when
from megazero.config.tree.option import of_model
from megazero.config.tree.roles import Role
from megazero.config.tree.transformer import TransformerConfig


class LatentConfig(TransformerConfig):
    """Keys and values that are made of one small vector of each token (multi-latent attention)"""

    needs = here.multi_latent_attention

    multi_latent_attention: bool = of_model(
        False,
        roles=Role.VARIANT | Role.MEGATRON_CORE | Role.HYBRIDS_IGNORE,
        switches={"--no-multi-latent-attention": False},
        needs=(
            here.family == "gpt",
            here.position_embedding_type.among("learned_absolute", "rope", "yarn", "none").because(
                "its heads have a part that is rotated"
            ),
            (here.rotary_percent == 1.0).because(
                "`--qk-pos-emb-head-dim` says how many channels are rotated"
            ),
            here.softmax_type == "vanilla",
            here.softmax_scale.is_none.because("YaRN says by how much it is sharper"),
            (here.qk_layernorm_scope == "head").because("it is the small vectors that have norms"),
            here.attention_output_gate.is_off,
            here.sparse_attention == "dense",
            here.add_qkv_bias.is_off.because("no projection but the last has biases"),
        ),
    )
    """make keys and values of one small vector of each token, beside which one rotated key serves all heads;
    --kv-channels then says nothing (DeepSeek-V2)"""
    q_lora_rank: PositiveInt | None = of_model(None, roles=Role.LATENT)
    """width of the small vector that queries are made of; default: they are made of the token's own"""
    kv_lora_rank: PositiveInt = of_model(32, roles=Role.LATENT)
    """width of the small vector that keys and values are made of"""
    qk_head_dim: PositiveInt = of_model(128, roles=Role.LATENT)
    """channels of a head's queries and keys that are not rotated"""
    qk_pos_emb_head_dim: PositiveInt = of_model(64, roles=Role.LATENT)
    """channels of a head's queries that are rotated, and of the key that all heads share"""
    v_head_dim: PositiveInt = of_model(128, roles=Role.LATENT)
    """channels of a head's values"""
    rope_type: Literal["rope", "yarn"] | None = of_model(
        None,
        roles=Role.ROTARY,
        needs=(
            when("yarn", here.multi_latent_attention | (here.position_embedding_type == "yarn")).because(
                "other attention takes `--position-embedding-type yarn`"
            ),
            when("rope", here.multi_latent_attention | (here.position_embedding_type == "rope")),
        ),
    )
    """how latent attention scales rotary positions: as --position-embedding-type rope does, or as YaRN;
    default: yarn, where a --rotary-scaling-factor of 1 changes nothing"""

    @property
    def head_dim(self) -> int:
        """Channels of the queries and keys of one attention head."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_dim(self) -> int:
        """Channels of the values of one attention head."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def scales_by_yarn(self) -> bool:
        """Whether rotary positions are scaled as YaRN does."""
        latent = self.multi_latent_attention and self.rope_type != "rope"
        return latent or self.position_embedding_type == "yarn"
