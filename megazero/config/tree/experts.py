"""Settings of experts in the section `model`: which layers have them, and the MLPs beside them.

Names are those of Megatron-LM's `--moe-*` flags (Fedus et al. 2022, Lepikhin et al. 2021); the layers'
placement by `--expert-interval`, pyramids and residual experts are DeepSpeed-MoE's (Rajbhandari et al. 2022).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt

from megazero.config.condition import here
from megazero.config.hybrid.settings import EXPERTS, HybridConfig
from megazero.config.tree.option import listed, of_model
from megazero.config.tree.roles import Role


def _dense_is_empty(counts: tuple[int, ...]) -> tuple[int, ...]:
    """One expert is the dense MLP, so a list of ones has no experts."""
    return () if all(count == 1 for count in counts) else counts


Counts = Annotated[tuple[PositiveInt, ...], BeforeValidator(listed), AfterValidator(_dense_is_empty)]
"""Number of experts of each layer with experts, or one number for all; ``()`` without experts."""

Pattern = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(listed), Field(min_length=1)]
"""The interval between layers with experts, as one number, or a 0 or 1 for each layer."""


class ExpertsConfig(HybridConfig):
    """Which layers have experts, and the sizes of these"""

    roles = Role.EXPERTS

    num_experts: Counts = of_model((), roles=Role.PLACEMENT | Role.MEGATRON, aliases=("--num-moe-experts",))
    """experts in each layer that has them, as one number or one for each such layer (a pyramid), such as
    [32]*10+[64]*2; default: none, and 1 is the dense MLP"""
    moe_layer_freq: Pattern | None = of_model(None, roles=Role.PLACEMENT | Role.MEGATRON)
    """N: every N-th layer has experts, the first one included (counted from 0: 0, N, 2N, ...); or a 0 or 1
    for each layer, such as ([0]*3+[1]*21); default: 1, unless --expert-interval is given"""
    expert_interval: PositiveInt | None = of_model(
        None,
        roles=Role.PLACEMENT,
        instead_of=("moe_layer_freq",),
        needs=here.moe_layer_freq.is_none.because(
            "`--moe-layer-freq N` begins with layer 0, this with layer N-1"
        ),
    )
    """N: every N-th layer has experts, the N-th being the first (counted from 0: N-1, 2N-1, ...), as in
    Megatron-DeepSpeed; instead of --moe-layer-freq"""
    moe_ffn_hidden_size: PositiveInt | None = of_model(None, roles=Role.MEGATRON, resolved="expert_ffn_size")
    """inner width of an expert; default: that of the MLP"""
    mlp_type: Literal["standard", "residual"] = of_model("standard")
    """standard: experts take the place of the MLP; residual: the MLP stays beside them, and a learned mix of
    both goes on"""
    moe_shared_expert_intermediate_size: PositiveInt | None = of_model(
        None,
        roles=Role.MEGATRON,
        needs=(here.mlp_type == "standard").because("shared experts are an MLP beside the experts already"),
    )
    """inner width of all shared experts together, through which every token goes; default: none"""
    moe_shared_expert_gate: bool = of_model(
        False, roles=Role.MEGATRON, needs=here.moe_shared_expert_intermediate_size
    )
    """weigh the shared experts by a learned sigmoid gate of each token"""

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of an expert (of each of the two halves with SwiGLU)."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_places(self) -> int:
        """Number of layers that the placement gives experts, whether or not the model has any."""
        if (kinds := self.layer_kinds) is not None:
            return kinds.count(EXPERTS)
        if self.expert_interval is not None:
            return self.num_layers // self.expert_interval
        pattern = self.moe_layer_freq or (1,)
        if is_frequency(pattern):
            return -(-self.num_layers // pattern[0])
        return sum(flag == 1 for flag in pattern)

    def expert_place(self, layer: int) -> int | None:
        """The index of `layer` among the layers with experts, from 0; None if it has none."""
        if (kinds := self.layer_kinds) is not None:
            return kinds[:layer].count(EXPERTS) if kinds[layer : layer + 1] == EXPERTS else None
        if self.expert_interval is not None:
            number, rest = divmod(layer + 1, self.expert_interval)
            return None if rest else number - 1
        pattern = self.moe_layer_freq or (1,)
        if is_frequency(pattern):
            number, rest = divmod(layer, pattern[0])
            return None if rest else number
        return sum(flag == 1 for flag in pattern[:layer]) if pattern[layer] == 1 else None

    @property
    def experts_by_layer(self) -> tuple[int, ...]:
        """Number of experts of every layer, 0 for a dense one; ``()`` if no layer has experts."""
        if not self.num_experts:
            return ()
        return tuple(map(self.experts_at, range(self.num_layers)))

    def experts_at(self, layer: int) -> int:
        """Number of experts of a layer (from 0); 0 for a dense one. Layers beyond the last are like it."""
        layer = min(layer, self.num_layers - 1)
        place = self.expert_place(layer) if self.num_experts else None
        if place is None:
            return 0
        count = self.num_experts[0 if len(self.num_experts) == 1 else place]
        return 0 if count == 1 else count


def is_frequency(pattern: tuple[int, ...]) -> bool:
    """Whether a pattern of layers is an interval, rather than a 0 or 1 for each layer."""
    return len(pattern) == 1 and pattern[0] > 0
