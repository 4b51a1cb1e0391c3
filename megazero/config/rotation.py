"""Rotary settings of the section `model`: which channels turn together, and in which layers."""

from __future__ import annotations

from megazero.config.condition import here
from megazero.config.tree.option import SkipPattern, is_interval, of_model
from megazero.config.tree.roles import Role
from megazero.config.tree.rotary import YarnConfig


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
