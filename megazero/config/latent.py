"""The latent part of the section about the model: attention over compressed keys and values (DeepSeek-V2)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from megazero.config.tree.option import option
from megazero.config.tree.transformer import TransformerConfig


class LatentConfig(TransformerConfig):
    """Keys and values that are made of one small vector of each token (multi-latent attention)"""

    needs = "multi_latent_attention"

    multi_latent_attention: bool = option(
        False,
        "make keys and values of one small vector of each token, beside which one rotated key serves all "
        "heads; --kv-channels then says nothing (DeepSeek-V2)",
        switches={"--no-multi-latent-attention": False},
        needs=(
            "family=gpt",
            "position_embedding_type=learned_absolute,rope,yarn,none: its heads have a part that is rotated",
            "rotary_percent=1.0: `--qk-pos-emb-head-dim` says how many channels are rotated",
            "softmax_type=vanilla",
            "softmax_scale=None: YaRN says by how much it is sharper",
            "qk_layernorm_scope=head: it is the small vectors that have norms",
            "attention_output_gate=False",
            "sparse_attention=dense",
            "add_qkv_bias=False: no projection but the last has biases",
        ),
    )
    q_lora_rank: PositiveInt | None = option(
        None, "width of the small vector that queries are made of; default: they are made of the token's own"
    )
    kv_lora_rank: PositiveInt = option(32, "width of the small vector that keys and values are made of")
    qk_head_dim: PositiveInt = option(128, "channels of a head's queries and keys that are not rotated")
    qk_pos_emb_head_dim: PositiveInt = option(
        64, "channels of a head's queries that are rotated, and of the key that all heads share"
    )
    v_head_dim: PositiveInt = option(128, "channels of a head's values")
    rope_type: Literal["rope", "yarn"] | None = option(
        None,
        "how latent attention scales rotary positions: as --position-embedding-type rope does, or as YaRN; "
        "default: yarn, where a --rotary-scaling-factor of 1 changes nothing",
        needs=(
            "yarn => multi_latent_attention or position_embedding_type=yarn: other attention takes "
            "`--position-embedding-type yarn`",
            "rope => multi_latent_attention or position_embedding_type=rope",
        ),
    )

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
