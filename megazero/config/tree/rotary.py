"""Rotary settings of the section `model`: how fast the channels of a head turn with the position."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megazero.config.condition import here
from megazero.config.latent import LatentConfig
from megazero.config.tree.option import SkipPattern, is_interval, of_model
from megazero.config.tree.roles import Role

_UNSCALED = here.use_rope_scaling.because("positions are not scaled so")


class RotaryConfig(LatentConfig):
    """Rotary positions, and their scaling to sequences longer than those of the first training"""

    rotary_percent: Annotated[float, Field(gt=0, le=1)] = of_model(1.0)
    """share of each head's channels that is rotated"""
    rotary_base: PositiveFloat = of_model(
        10000.0,
        roles=Role.ROTARY,
        aliases=("--rotary-position-embeddings-theta",),
        needs=here.position_embedding_type.among("rope", "yarn") | here.multi_latent_attention,
    )
    """base of the rotary frequencies"""
    window_rotary_base: PositiveFloat | None = of_model(
        None,
        roles=Role.ROTARY | Role.VARIANT,
        needs=(here.position_embedding_type.among("rope", "yarn"), here.window_size),
    )
    """base in the layers with a window, whose positions are then not scaled (Gemma 3); default: as in the
    others"""
    rotary_seq_len_interpolation_factor: PositiveFloat | None = of_model(
        None, roles=Role.ROTARY | Role.HYBRIDS_IGNORE, needs=here.position_embedding_type == "rope"
    )
    """divide rotary positions by this (Chen et al. 2023)"""
    use_rope_scaling: bool = of_model(
        False, roles=Role.ROTARY | Role.HYBRIDS_IGNORE, needs=here.position_embedding_type == "rope"
    )
    """slow the slow channels down by --rope-scaling-factor, as Llama 3.1 does"""
    rope_scaling_factor: PositiveFloat = of_model(8.0, roles=Role.ROTARY, idle_without=_UNSCALED)
    """factor between the longest sequence and that of the first training"""
    rope_low_freq_factor: PositiveFloat = of_model(1.0, roles=Role.ROTARY, idle_without=_UNSCALED)
    """channels that turn fewer times than this in the first training's length slow down"""
    rope_high_freq_factor: PositiveFloat = of_model(4.0, roles=Role.ROTARY, idle_without=_UNSCALED)
    """channels that turn more times than this in that length stay as they are"""
    rope_original_max_position_embeddings: PositiveInt = of_model(
        8192, roles=Role.ROTARY, unit="tokens", idle_without=_UNSCALED
    )
    """the sequence length of the first training"""


class YarnConfig(RotaryConfig):
    """YaRN's scaling, and properties of all rotary positions"""

    needs = (here.position_embedding_type == "yarn") | here.multi_latent_attention
    roles = Role.ROTARY | Role.YARN

    rotary_scaling_factor: Annotated[float, Field(ge=1)] = of_model(1.0)
    """YaRN: factor between the longest sequence and that of the first training"""
    yarn_original_max_position_embeddings: PositiveInt = of_model(4096, unit="tokens")
    """YaRN: the sequence length of the first training"""
    yarn_beta_fast: PositiveFloat = of_model(32.0, aliases=("--beta-fast",))
    """YaRN: channels that turn more times than this in that length stay as they are"""
    yarn_beta_slow: PositiveFloat = of_model(1.0, aliases=("--beta-slow",))
    """YaRN: channels that turn fewer times than this slow down by the whole factor"""
    yarn_correction_range_round_to_int: bool = of_model(
        True,
        switches={"--yarn-correction-range-round-to-int": True},
    )
    """YaRN: let the two limits fall between channels"""
    mscale: NonNegativeFloat = of_model(1.0)
    """YaRN: attention is sharpened by 0.1 x this x ln(factor) + 1 for queries and for keys"""
    mscale_all_dim: NonNegativeFloat = of_model(0.0)
    """YaRN: divides that by 0.1 x this x ln(factor) + 1; latent attention multiplies its scores by the square
    of it"""

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
        """The sequence length that positions are scaled to; None where they are not."""
        factor = self.rope_scaling_factor if self.use_rope_scaling else self.rotary_scaling_factor
        return None if self.scaled_from is None else self.scaled_from * factor


class RotationConfig(YarnConfig):
    """Pairs of neighbouring channels (Cohere), and layers without rotary positions (SmolLM3)"""

    rotary_interleaved: bool = of_model(
        False,
        roles=Role.VARIANT | Role.MEGATRON_CORE | Role.HYBRIDS_IGNORE,
        needs=(
            here.position_embedding_type.among("rope", "yarn"),
            here.multi_latent_attention.is_off.because("it turns such pairs anyway"),
        ),
    )
    """rotate channels 2i and 2i + 1 of a head together, not those half a rotation apart (GPT-J, Cohere)"""
    no_rope_freq: SkipPattern | None = of_model(
        None,
        roles=Role.VARIANT | Role.MEGATRON_CORE,
        needs=(
            here.position_embedding_type.among("rope", "yarn"),
            here.multi_latent_attention.is_off.because("its rotation is its own"),
        ),
        resolved="unrotated",
    )
    """N: every N-th layer has no rotary positions (counted from 1: N, 2N, ...); or for each layer a 0, or a 1
    for none, such as ([0]*3+[1])*4 (SmolLM3, Cohere2)"""

    def rotates_at(self, layer: int) -> bool:
        """Whether a layer (from 0) rotates queries and keys; layers beyond the last are like it."""
        layer, pattern = min(layer, self.num_layers - 1), self.no_rope_freq
        if not self.rotates or pattern is None:
            return self.rotates
        return (layer + 1) % pattern[0] > 0 if is_interval(pattern) else pattern[layer] == 0

    @property
    def unrotated(self) -> tuple[int, ...] | None:
        """A 0 or 1 for each layer, 1 for one without rotary positions; None if all are alike."""
        turned = map(self.rotates_at, range(self.num_layers if self.no_rope_freq else 0))
        return tuple(int(not rotates) for rotates in turned) or None
