"""The model's section of the tree: the transformer's shape, and the experts that take the place of MLPs.

Names are those of Megatron-LM's `--moe-*` flags (Fedus et al. 2022, Lepikhin et al. 2021); the layers'
placement by `--expert-interval`, pyramids and residual experts are DeepSpeed-MoE's (Rajbhandari et al. 2022).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from megazero.config.tree.option import Probability, option
from megazero.config.tree.transformer import TransformerConfig


def _listed(value: Any) -> Any:
    """One number stands for a list of it."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def _dense_is_empty(counts: tuple[int, ...]) -> tuple[int, ...]:
    """One expert is the dense MLP, so a list of ones has no experts."""
    return () if all(count == 1 for count in counts) else counts


def _none_if_negative(value: Any) -> Any:
    """Megatron-LM writes a negative capacity factor for none."""
    return None if isinstance(value, int | float) and value < 0 else value


Counts = Annotated[tuple[PositiveInt, ...], BeforeValidator(_listed), AfterValidator(_dense_is_empty)]
"""Numbers of experts; ``()`` if no layer has any."""

Pattern = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_listed), Field(min_length=1)]
"""The interval between layers with experts, as one number, or a 0 or 1 for each layer."""

Capacity = Annotated[PositiveFloat | None, BeforeValidator(_none_if_negative)]
"""A capacity factor; None if an expert takes all that is sent to it."""

Balance = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
"""The part of the data that a load-balancing loss counts over: a micro-batch, a sequence, a global batch."""


class ModelConfig(TransformerConfig):
    """Model shape"""

    num_experts: Counts = option(
        (),
        "experts in each layer that has them, as one number or one for each such layer (a pyramid), such as "
        "[32]*10+[64]*2; default: none, and 1 is the dense MLP",
        aliases=("--num-moe-experts",),
    )
    moe_layer_freq: Pattern | None = option(
        None,
        "N: every N-th layer has experts, the first one included (counted from 0: 0, N, 2N, ...); or a 0 or "
        "1 for each layer, such as ([0]*3+[1]*21); default: 1, unless --expert-interval is given",
    )
    expert_interval: PositiveInt | None = option(
        None,
        "N: every N-th layer has experts, the N-th being the first (counted from 0: N-1, 2N-1, ...), as in "
        "Megatron-DeepSpeed; instead of --moe-layer-freq",
        needs=(
            "moe_layer_freq=None: of layers counted from 0, `--moe-layer-freq N` takes 0, N and so on, "
            "and `--expert-interval N` takes N-1, 2N-1 and so on"
        ),
    )
    moe_ffn_hidden_size: PositiveInt | None = option(
        None, "inner width of an expert; default: that of the MLP"
    )
    mlp_type: Literal["standard", "residual"] = option(
        "standard",
        "standard: experts take the place of the MLP; residual: the MLP stays beside them, and a learned mix "
        "of both goes on",
    )
    moe_shared_expert_intermediate_size: PositiveInt | None = option(
        None,
        "inner width of all shared experts together, through which every token goes; default: none",
        needs="mlp_type=standard: shared experts are an MLP beside the experts already",
    )
    moe_shared_expert_gate: bool = option(
        False,
        "weigh the shared experts by a learned sigmoid gate of each token",
        needs="moe_shared_expert_intermediate_size",
    )
    moe_router_topk: PositiveInt = option(2, "experts that each token is sent to", aliases=("--topk",))
    moe_router_score_function: Literal["softmax", "sigmoid"] = option(
        "softmax",
        "how the router's logits become scores",
        refused={"sqrtsoftplus": "is not offered"},
    )
    moe_router_pre_softmax: bool = option(
        False, "take the softmax over all experts before the choice instead of over the chosen ones after it"
    )
    moe_router_num_groups: PositiveInt | None = option(
        None,
        "groups of neighbouring experts, of which each token chooses some first; default: no groups",
        needs="moe_router_group_topk",
    )
    moe_router_group_topk: PositiveInt | None = option(
        None, "groups that each token chooses", needs="moe_router_num_groups"
    )
    moe_router_topk_scaling_factor: PositiveFloat | None = option(
        None, "multiplies the weights of the chosen experts; default: 1"
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "balance by a bias of each expert that is added to the scores for the choice alone, and moves after "
        "each step towards equal loads",
        needs="moe_router_score_function=sigmoid",
    )
    moe_router_bias_update_rate: NonNegativeFloat = option(1e-3, "how far that bias moves in a step")
    moe_router_load_balancing_type: Annotated[tuple[Balance, ...], Field(min_length=1)] = option(
        ("aux_loss",),
        "load-balancing losses, by what they count over: aux_loss a micro-batch, seq_aux_loss a sequence, "
        "global_aux_loss the global batch before",
        refused={
            "sinkhorn": "chooses by an assignment that depends on the other tokens of the rank, and is not "
            "offered; take aux_loss, or --moe-router-enable-expert-bias",
            "quantile_balancing": "is not offered; take --moe-router-enable-expert-bias",
        },
    )
    moe_aux_loss_coeff: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] = option(
        (0.0,),
        "weights of these losses, one for each of them; 0.01 is customary",
        aliases=("--moe-loss-coeff",),
    )
    moe_z_loss_coeff: NonNegativeFloat = option(
        0.0, "weight of the z-loss, which keeps the router's logits small; 0.001 is customary"
    )
    moe_input_jitter_eps: Probability = option(
        0.0, "training: multiply the router's input by noise that is uniform in 1 - EPS to 1 + EPS"
    )
    moe_router_sampling: Literal["none", "first", "second"] = option(
        "none",
        "add Gumbel noise to the logits for the choice of the only expert (first) or of the second of two, "
        "as DeepSpeed does",
        switches={"--disable-moe-top2-2nd-expert-sampling": "none"},
        needs=("moe_router_score_function=softmax", "moe_router_num_groups=None"),
    )
    moe_expert_capacity_factor: Capacity = option(
        None,
        "the most tokens that an expert takes, as a multiple of an even share; the rest are dropped; "
        "default, and with a negative number: no limit",
        aliases=("--moe-train-capacity-factor",),
        switches={"--disable-moe-token-dropping": None},
        # Megatron-DeepSpeed's switch overrules its factors, which its scripts always give.
        yielding=("--moe-train-capacity-factor",),
        implies={"--disable-moe-token-dropping": ("moe_eval_capacity_factor", None)},
    )
    moe_eval_capacity_factor: Capacity = option(
        None,
        "the same factor in evaluation; default: that of the training",
        yielding=("--moe-eval-capacity-factor",),
        needs="moe_expert_capacity_factor: without it no token is dropped",
    )
    moe_min_capacity: NonNegativeInt = option(0, "least capacity of an expert", unit="tokens")
    moe_token_drop_policy: Literal["probs", "position", "random"] = option(
        "probs",
        "which tokens an expert keeps where there are too many: those with the largest weights, the first "
        "ones, or random ones",
    )
    moe_capacity_scope: Literal["sequence", "micro_batch"] = option(
        "sequence",
        "where capacity is counted: within each sequence, so that no layout changes the numbers, or over the "
        "sequences of a micro-batch",
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False,
        "give every expert exactly as many rows as its capacity, some of them empty",
        needs=(
            "moe_expert_capacity_factor",
            (
                "parallel.moe_token_dispatcher_type=alltoall: an all-gather moves whole tokens, so there is"
                " nothing to pad"
            ),
        ),
    )

    @property
    def balance_losses(self) -> dict[str, float]:
        """Kind of load-balancing loss -> its weight, of those that are in use."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=True)
        return {kind: weight for kind, weight in pairs if kind != "none" and weight}

    @property
    def drops_tokens(self) -> bool:
        """Whether experts have a capacity, in training or in evaluation."""
        return self.moe_expert_capacity_factor is not None or self.moe_eval_capacity_factor is not None

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of an expert (of each of the two halves with SwiGLU)."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_places(self) -> int:
        """Number of layers that experts are placed in, or would be if the model had some."""
        if self.expert_interval is not None:
            return self.num_layers // self.expert_interval
        pattern = self.moe_layer_freq or (1,)
        if is_frequency(pattern):
            return -(-self.num_layers // pattern[0])
        return sum(flag == 1 for flag in pattern)

    def expert_place(self, layer: int) -> int | None:
        """The number of `layer` among the layers for experts, from 0; None if it is not one of them."""
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
        """Number of experts of one layer (from 0); 0 for a dense one."""
        place = self.expert_place(layer) if self.num_experts else None
        if place is None:
            return 0
        count = self.num_experts[0 if len(self.num_experts) == 1 else place]
        return 0 if count == 1 else count


def is_frequency(pattern: tuple[int, ...]) -> bool:
    """Whether a pattern of layers is an interval, rather than a 0 or 1 for each layer."""
    return len(pattern) == 1 and pattern[0] > 0
