"""Hybrid models in the section `model`: each layer is one mixer or one MLP, by a pattern of letters.

The names and the pattern's letters are Megatron-LM's (Waleffe et al. 2024); Mamba-2 is Dao & Gu 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from megazero.config.condition import config, here
from megazero.config.heterogeneous.settings import HeterogeneousConfig
from megazero.config.tree.option import of_model
from megazero.config.tree.roles import Role

MAMBA, ATTENTION, DENSE, EXPERTS = "M*-E"
_ELSEWHERE = (
    ("/", "layers after `/` predict several tokens at once, which hybrid models do not here"),
    ("|", "stages are cut by `--pipeline-partition` with numbers of layers, such as 5,6,6,5"),
)


def _letters(pattern: str) -> str:
    for mark, why in _ELSEWHERE:
        if mark in pattern:
            raise ValueError(f"must be a letter for each layer ({why})")
    if not pattern or set(pattern) - set("M*-E"):
        raise ValueError("must be made of M (Mamba-2), * (attention), - (MLP) and E (experts)")
    return pattern


Letters = Annotated[str, AfterValidator(_letters)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class HybridConfig(HeterogeneousConfig):
    """Layers that are one mixer or one MLP each, state-space ones among them"""

    needs = here.is_hybrid_model

    is_hybrid_model: bool = of_model(
        False,
        roles=Role.PLACEMENT | Role.VARIANT,
        needs=(
            (here.family == "gpt").because("a state-space layer sees earlier tokens alone"),
            (config.parallel.context_parallel_size == 1).because(
                "a sequence's state passes through it in order"
            ),
            here.moe_layer_freq.is_none.because("the pattern says which layers have experts"),
            here.expert_interval.is_none.because("the pattern says which layers have experts"),
            here.apply_residual_connection_post_layernorm.is_off.because(
                "such layers take the residual before the norm"
            ),
            (here.norm_position == "input").because("such layers have one norm"),
            here.use_parallel_residual.is_off.because("such layers have one part"),
            here.mtp_num_layers.is_none.because("the pattern has no letter for further tokens"),
            config.distillation.kd.is_off.because("the pattern is of the student's depth"),
        ),
    )
    """make each layer one mixer or one MLP, by the pattern or the ratios; without them, all are Mamba-2"""
    hybrid_layer_pattern: Letters | None = of_model(
        None,
        aliases=("--hybrid-override-pattern",),
        instead_of=("hybrid_attention_ratio", "hybrid_mlp_ratio"),
        resolved="layer_kinds",
    )
    """a letter for each layer: M Mamba-2, * attention, - MLP, E experts; `--num-layers` may be left out"""
    hybrid_attention_ratio: Ratio = of_model(0.0, roles=Role.PLACEMENT)
    """share of the layers that are attention, evenly spread"""
    hybrid_mlp_ratio: Ratio = of_model(0.0, roles=Role.PLACEMENT)
    """share of the layers that are MLPs, evenly spread"""
    mamba_state_dim: PositiveInt = of_model(128, roles=Role.MAMBA)
    """numbers in the state of each channel of a Mamba-2 layer"""
    mamba_head_dim: PositiveInt = of_model(64, roles=Role.MAMBA)
    """channels of a head of a Mamba-2 layer"""
    mamba_num_groups: PositiveInt = of_model(8, roles=Role.MAMBA)
    """groups of heads that share what is written and read"""
    mamba_num_heads: PositiveInt | None = of_model(None, roles=Role.MAMBA, resolved="mamba_heads")
    """heads of a Mamba-2 layer; default: 2 x hidden / --mamba-head-dim"""
    mamba_min_step: NonNegativeFloat = of_model(0.0)
    """shortest step of a head of a Mamba-2 layer; Nemotron-H has 0.001 in transformers"""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: object) -> object:
        # A section that is made by hand has the same implications as one of a command line.
        return cls.implied(data) if isinstance(data, dict) else data

    @classmethod
    def implied(cls, values: dict[str, object]) -> dict[str, object]:
        """Take the model's depth from the pattern; a pattern or a ratio makes a model hybrid."""
        values = super().implied(values)
        pattern = values.get("hybrid_layer_pattern")
        if pattern or values.get("hybrid_attention_ratio") or values.get("hybrid_mlp_ratio"):
            values = {"is_hybrid_model": True, **values}
        return {"num_layers": len(pattern), **values} if isinstance(pattern, str) and pattern else values

    @property
    def layer_kinds(self) -> str | None:
        """The letter of each layer; None where every layer is attention and an MLP."""
        if not self.is_hybrid_model:
            return None
        return self.hybrid_layer_pattern or self.letters_by_ratio

    @property
    def letters_by_ratio(self) -> str:
        """The letters that the ratios ask for.

        Attention layers separate equally long runs of other layers. MLPs are then spread evenly over these,
        each at the end of a run of Mamba-2 layers.
        """
        attention, mlps = (
            round(self.num_layers * ratio) for ratio in (self.hybrid_attention_ratio, self.hybrid_mlp_ratio)
        )
        others = self.num_layers - attention
        among_all = _spread(others / (attention + 1))
        among_others = _spread((others - mlps) / mlps if mlps else float("inf"))
        return "".join(
            ATTENTION if next(among_all) else DENSE if next(among_others) else MAMBA
            for _ in range(self.num_layers)
        )

    @property
    def layer_parts(self) -> tuple[str, ...] | None:
        """The letters of each layer's parts; None where every layer is attention and an MLP."""
        shapes = self.layer_shapes
        if shapes is None:
            return None if self.layer_kinds is None else tuple(self.layer_kinds)
        return tuple(ATTENTION * (shape.groups > 0) + DENSE * (shape.width > 0) for shape in shapes)

    def layers_of(self, letters: str) -> int:
        """The number of layers with one of these letters; all layers where each is attention and an MLP."""
        parts = self.layer_parts
        return self.num_layers if parts is None else sum(bool({*part} & {*letters}) for part in parts)

    @property
    def mamba_heads(self) -> int | None:
        """Heads of a Mamba-2 layer; None where there is none."""
        if MAMBA not in (self.layer_kinds or ""):
            return None
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def mamba_width(self) -> int:
        """Channels of all heads of a Mamba-2 layer."""
        return (self.mamba_heads or 0) * self.mamba_head_dim

    @property
    def residual_writers(self) -> int:
        """The number of mixers and MLPs in the model: each adds to the residual stream."""
        return self.num_layers * (1 if self.is_hybrid_model else 2)


def _spread(gap: float) -> Iterator[bool]:
    """Yield for each place in turn whether it is taken; about `gap` free ones precede each taken one."""
    left = gap
    while True:
        taken = left < 0.5
        left += gap if taken else -1
        yield taken
