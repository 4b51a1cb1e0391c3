"""The rotary part of the section about the model: how fast the channels of a head turn with the position."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megazero.config.latent import LatentConfig
from megazero.config.tree.option import option

_YARN = "position_embedding_type=yarn or multi_latent_attention"


class RotaryConfig(LatentConfig):
    """Rotary positions, and their scaling to sequences longer than those of the first training"""

    rotary_percent: Annotated[float, Field(gt=0, le=1)] = option(
        1.0, "share of each head's channels that is rotated"
    )
    rotary_base: PositiveFloat = option(
        10000.0,
        "base of the rotary frequencies",
        aliases=("--rotary-position-embeddings-theta",),
        needs="position_embedding_type=rope,yarn or multi_latent_attention",
    )
    window_rotary_base: PositiveFloat | None = option(
        None,
        "base in the layers with a window, whose positions are then not scaled (Gemma 3); default: as in "
        "the others",
        needs=("position_embedding_type=rope,yarn", "window_size"),
    )
    rotary_seq_len_interpolation_factor: PositiveFloat | None = option(
        None,
        "divide rotary positions by this (Chen et al. 2023)",
        needs="position_embedding_type=rope",
    )
    use_rope_scaling: bool = option(
        False,
        "slow the slow channels down by --rope-scaling-factor, as Llama 3.1 does",
        needs="position_embedding_type=rope",
    )
    rope_scaling_factor: PositiveFloat = option(
        8.0, "factor between the longest sequence and that of the first training"
    )
    rope_low_freq_factor: PositiveFloat = option(
        1.0,
        "channels that turn fewer times than this in the first training's length slow down",
    )
    rope_high_freq_factor: PositiveFloat = option(
        4.0, "channels that turn more times than this in that length stay as they are"
    )
    rope_original_max_position_embeddings: PositiveInt = option(
        8192, "the sequence length of the first training", unit="tokens"
    )
    rotary_scaling_factor: Annotated[float, Field(ge=1)] = option(
        1.0, "YaRN: factor between the longest sequence and that of the first training", needs=_YARN
    )
    yarn_original_max_position_embeddings: PositiveInt = option(
        4096,
        "YaRN: the sequence length of the first training",
        unit="tokens",
        needs=_YARN,
    )
    yarn_beta_fast: PositiveFloat = option(
        32.0,
        "YaRN: channels that turn more times than this in that length stay as they are",
        aliases=("--beta-fast",),
        needs=_YARN,
    )
    yarn_beta_slow: PositiveFloat = option(
        1.0,
        "YaRN: channels that turn fewer times than this slow down by the whole factor",
        aliases=("--beta-slow",),
        needs=_YARN,
    )
    yarn_correction_range_round_to_int: bool = option(
        True,
        "YaRN: let the two limits fall between channels",
        flag="--no-yarn-correction-range-round-to-int",
        switches={"--yarn-correction-range-round-to-int": True},
        needs=_YARN,
    )
    mscale: NonNegativeFloat = option(
        1.0,
        "YaRN: attention is sharpened by 0.1 x this x ln(factor) + 1 for queries and for keys",
        needs=_YARN,
    )
    mscale_all_dim: NonNegativeFloat = option(
        0.0,
        "YaRN: divides that by 0.1 x this x ln(factor) + 1; latent attention multiplies its scores by the "
        "square of it",
        needs=_YARN,
    )

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return self.multi_latent_attention or self.position_embedding_type in ("rope", "yarn")

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def scaled_from(self) -> int | None:
        """The sequence length of the first training, where positions are scaled by it (YaRN, Llama 3)."""
        if self.scales_by_yarn:
            return self.yarn_original_max_position_embeddings
        return self.rope_original_max_position_embeddings if self.use_rope_scaling else None

    @property
    def scaled_to(self) -> float | None:
        """The sequence length that such positions are scaled to."""
        factor = self.rope_scaling_factor if self.use_rope_scaling else self.rotary_scaling_factor
        return None if self.scaled_from is None else self.scaled_from * factor
