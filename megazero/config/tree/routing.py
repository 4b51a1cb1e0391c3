"""Routing settings of the section `model`: how tokens are sent to experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.condition import config, here, when
from megazero.config.tree.option import Probability, Section, of_model, of_training
from megazero.config.tree.roles import Role

_DROPS = here.moe_expert_capacity_factor.because("no token is dropped")
_SOFTMAX = (here.moe_router_score_function == "softmax").because(
    "sigmoid scores are taken before the choice anyway"
)


def _none_if_negative(value: object) -> object:
    """Turn a negative capacity factor, which is Megatron-LM's way to say none, into None."""
    return None if isinstance(value, int | float) and value < 0 else value


Capacity = Annotated[PositiveFloat | None, BeforeValidator(_none_if_negative)]
"""A capacity factor; None if an expert takes all that is sent to it."""

Balance = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
"""The data over which a load-balancing loss counts: a micro-batch, a sequence or a global batch. Instead of
losses, sinkhorn is an even assignment."""


class ChoiceConfig(Section):
    """The choice of a token's experts"""

    roles = Role.EXPERTS

    moe_router_topk: PositiveInt = of_model(2, roles=Role.MEGATRON, aliases=("--topk",))
    """experts that each token is sent to"""
    moe_router_score_function: Literal["softmax", "sigmoid"] = of_model(
        "softmax", roles=Role.MEGATRON, refused={"sqrtsoftplus": "is not offered"}
    )
    """how the router's logits become scores"""
    moe_router_bias: bool = of_model(False, roles=Role.VARIANT)
    """add a learned bias to the router's logits (gpt-oss); Megatron-LM does wherever linear layers have
    biases"""
    moe_router_pre_softmax: bool = of_model(False, roles=Role.MEGATRON, idle_without=_SOFTMAX)
    """take the softmax over all experts before the choice instead of over the chosen ones after it"""
    moe_router_num_groups: PositiveInt | None = of_model(
        None, roles=Role.MEGATRON, needs=here.moe_router_group_topk
    )
    """groups of neighbouring experts, of which each token chooses some first; default: no groups"""
    moe_router_group_topk: PositiveInt | None = of_model(
        None, roles=Role.MEGATRON, needs=here.moe_router_num_groups
    )
    """groups that each token chooses"""
    moe_router_topk_scaling_factor: PositiveFloat | None = of_model(None, roles=Role.MEGATRON)
    """multiplies the weights of the chosen experts; default: 1"""
    moe_router_enable_expert_bias: bool = of_model(
        False, roles=Role.MEGATRON, needs=here.moe_router_score_function == "sigmoid"
    )
    """balance by a bias of each expert that is added to the scores for the choice alone, and moves after each
    step towards equal loads"""
    moe_n_hash_layers: NonNegativeInt = of_model(
        0,
        roles=Role.VARIANT,
        needs=(
            here.family.among("gpt", "bert").because("a decoder's layers would have two kinds of ids"),
            here.is_hybrid_model.is_off,
            (config.skipping.random_ltd.is_off | (config.parallel.context_parallel_size == 1)).because(
                "ranks know their own ids"
            ),
        ),
    )
    """first layers of the model whose experts a fixed table names by the tokens' ids; the scores weigh them
    (Hash Layers, DeepSeek-V4)"""


class BalanceConfig(Section):
    """The balance of the experts, and noise in the choice, in training alone"""

    roles = Role.EXPERTS

    moe_router_bias_update_rate: NonNegativeFloat = of_training(
        1e-3,
        roles=Role.MEGATRON,
        idle_without=here.moe_router_enable_expert_bias.because("the choice has no bias"),
    )
    """how far that bias moves in a step"""
    moe_router_load_balancing_type: Annotated[tuple[Balance, ...], Field(min_length=1)] = of_training(
        ("aux_loss",),
        roles=Role.MEGATRON,
        refused={"quantile_balancing": "is not offered; take --moe-router-enable-expert-bias"},
    )
    """load-balancing losses, by what they count over: aux_loss a micro-batch, seq_aux_loss a sequence,
    global_aux_loss the global batch before; sinkhorn: no loss, but training chooses by an assignment of the
    micro-batch's tokens that gives all experts even shares"""
    moe_aux_loss_coeff: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] = of_training(
        (0.0,), roles=Role.MEGATRON, aliases=("--moe-loss-coeff",)
    )
    """weights of these losses, one for each of them; 0.01 is customary"""
    moe_z_loss_coeff: NonNegativeFloat = of_training(0.0, roles=Role.MEGATRON)
    """weight of the z-loss, which keeps the router's logits small; 0.001 is customary"""
    moe_input_jitter_eps: Probability = of_training(0.0, roles=Role.MEGATRON)
    """training: multiply the router's input by noise that is uniform in 1 - EPS to 1 + EPS"""
    moe_router_sampling: Literal["none", "first", "second"] = of_training(
        "none",
        switches={"--disable-moe-top2-2nd-expert-sampling": "none"},
        needs=(
            when("first", here.moe_router_topk == 1),
            when("second", here.moe_router_topk == 2),
            here.moe_router_score_function == "softmax",
            here.moe_router_num_groups.is_none,
        ),
    )
    """add Gumbel noise to the logits for the choice of the only expert (first) or of the second of two, as
    DeepSpeed does"""

    moe_router_force_load_balancing: bool = of_training(
        False, needs=(here.moe_n_hash_layers == 0).because("a table says which experts tokens have")
    )
    """put random numbers in the place of the router's logits in training, so that experts are evenly loaded
    whatever the router has learnt: for benchmarks; its gradient is that of the logits"""

    @property
    def assigns(self) -> bool:
        """Whether training chooses experts by an even assignment of tokens."""
        return self.moe_router_load_balancing_type == ("sinkhorn",)

    @property
    def balance_losses(self) -> dict[str, float]:
        """Kind of load-balancing loss -> its weight, for the losses in use."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=True)
        return {kind: weight for kind, weight in pairs if kind not in ("none", "sinkhorn") and weight}


class RouterConfig(BalanceConfig, ChoiceConfig):
    """The settings of a router: choice and balance"""


class CapacityConfig(Section):
    """The most tokens that an expert takes"""

    roles = Role.EXPERTS

    moe_expert_capacity_factor: Capacity = of_training(
        None,
        roles=Role.MEGATRON,
        aliases=("--moe-train-capacity-factor",),
        switches={"--disable-moe-token-dropping": None},
        # Megatron-DeepSpeed's switch overrules its factors, which its scripts always give.
        yielding=("--moe-train-capacity-factor",),
        implies={"--disable-moe-token-dropping": ("moe_eval_capacity_factor", None)},
    )
    """the most tokens that an expert takes, as a multiple of an even share; the rest are dropped; default,
    and with a negative number: no limit"""
    moe_eval_capacity_factor: Capacity = of_training(
        None,
        yielding=("--moe-eval-capacity-factor",),
        needs=here.moe_expert_capacity_factor.because("without it no token is dropped"),
    )
    """the same factor in evaluation; default: that of the training"""
    moe_min_capacity: NonNegativeInt = of_training(0, unit="tokens", idle_without=_DROPS)
    """least capacity of an expert"""
    moe_token_drop_policy: Literal["probs", "position", "random"] = of_training("probs", idle_without=_DROPS)
    """which tokens an expert keeps where there are too many: those with the largest weights, the first ones,
    or random ones"""
    moe_capacity_scope: Literal["sequence", "micro_batch"] = of_training("sequence", idle_without=_DROPS)
    """where capacity is counted: within each sequence, so that no layout changes the numbers, or over the
    sequences of a micro-batch"""
    moe_pad_expert_input_to_capacity: bool = of_training(
        False,
        needs=(
            here.moe_expert_capacity_factor,
            (config.parallel.moe_token_dispatcher_type == "alltoall").because(
                "an all-gather moves whole tokens"
            ),
        ),
    )
    """give every expert exactly as many rows as its capacity, some of them empty"""

    @property
    def drops_tokens(self) -> bool:
        """Whether experts have a capacity, in training or in evaluation."""
        return self.moe_expert_capacity_factor is not None or self.moe_eval_capacity_factor is not None


class RoutingConfig(CapacityConfig, RouterConfig):
    """The choice of experts, and their capacity"""
