"""Rules about upcycling: what must hold so that a model with experts begins as the dense one does."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.rules.rule import Case, Rule
from megazero.config.tree import Config, ModelConfig

_SWITCH = "checkpoint.moe_use_upcycling"
_EXPERTS = "model.num_experts"
_TOPK = "model.moe_router_topk"


def _upcycling(holds: Callable[[Config], bool]) -> Callable[[Case], bool]:
    """Make a predicate on any case of one on runs that upcycle; it holds for all others."""
    return lambda case: not case.config.checkpoint.moe_use_upcycling or holds(case.config)


def _experts_upcycled(holds: Callable[[ModelConfig], bool]) -> Callable[[Case], bool]:
    return _upcycling(lambda config: not config.model.num_experts or holds(config.model))


def _weights_sum_to_one(model: ModelConfig) -> bool:
    if model.moe_router_score_function == "softmax":
        return not model.moe_router_pre_softmax
    return model.moe_router_topk > 1


UPCYCLING_RULES: tuple[Rule, ...] = (
    Rule(
        "upcycling_makes_experts",
        (_EXPERTS,),
        "`num_experts` must be set with `moe_use_upcycling`",
        "add `--num-experts`, or leave out `--moe-use-upcycling`",
        _upcycling(lambda config: bool(config.model.num_experts)),
        reads=(_SWITCH,),
    ),
    Rule(
        "upcycling_has_a_dense_model",
        ("checkpoint.load", "checkpoint.load_hf"),
        "`load` or `load_hf` must be set with `moe_use_upcycling`",
        "name the folder of the dense model",
        _upcycling(lambda config: bool(config.checkpoint.load or config.checkpoint.load_hf)),
        reads=(_SWITCH,),
    ),
    Rule(
        "upcycling_is_for_pretraining",
        (_SWITCH, "finetune.task"),
        "`moe_use_upcycling` must be off where a model is fine-tuned for a task",
        "pretrain the model with experts first",
        _upcycling(lambda config: config.finetune.task is None),
    ),
    Rule(
        "upcycled_weights_sum_to_one",
        ("model.moe_router_pre_softmax", "model.moe_router_score_function", _TOPK),
        "the weights of a token's experts must sum to one with `moe_use_upcycling`, so that copies of one "
        "MLP compute what it does: `moe_router_pre_softmax` must be off with softmax scores, and "
        "`moe_router_topk` above 1 with sigmoid scores",
        "take the softmax after the choice, with `--moe-router-topk 2` or more",
        _experts_upcycled(_weights_sum_to_one),
        reads=(_SWITCH, _EXPERTS),
    ),
    Rule(
        "upcycled_weights_are_not_scaled",
        ("model.moe_router_topk_scaling_factor",),
        "`moe_router_topk_scaling_factor` must be unset with `moe_use_upcycling`, so that copies of one MLP "
        "compute what it does",
        "leave it out",
        _experts_upcycled(lambda model: model.moe_router_topk_scaling_factor in (None, 1.0)),
        reads=(_SWITCH, _EXPERTS),
    ),
    Rule(
        "upcycled_experts_are_alone",
        ("model.mlp_type", "model.moe_shared_expert_intermediate_size"),
        "`mlp_type` must be standard and `moe_shared_expert_intermediate_size` unset with "
        "`moe_use_upcycling`, as the dense model has nothing for an MLP beside the experts",
        "leave them out",
        _experts_upcycled(
            lambda model: model.mlp_type == "standard" and model.moe_shared_expert_intermediate_size is None
        ),
        reads=(_SWITCH, _EXPERTS),
    ),
    Rule(
        "upcycled_experts_drop_nothing",
        ("model.moe_expert_capacity_factor",),
        "`moe_expert_capacity_factor` must be unset with `moe_use_upcycling`, as a dropped token would miss "
        "the MLP that it went through before",
        "leave it out",
        _experts_upcycled(lambda model: model.moe_expert_capacity_factor is None),
        reads=(_SWITCH, _EXPERTS),
    ),
    Rule(
        "upcycled_experts_have_the_mlp_s_width",
        ("model.moe_ffn_hidden_size", "model.ffn_hidden_size"),
        "`moe_ffn_hidden_size` must be the MLP's width with `moe_use_upcycling`",
        "leave it out",
        _experts_upcycled(lambda model: model.expert_ffn_size == model.ffn_size),
        lambda c: f"the MLP's width is {c.config.model.ffn_size}",
        reads=(_SWITCH, _EXPERTS, "model.hidden_size", "model.activation"),
    ),
)
