"""Rules about how tokens are routed to experts, how the experts are balanced, and how much they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megazero.config.fields import FIELD_BY_PATH, paths
from megazero.config.rules.rule import Case, Rule
from megazero.config.tree.model import ModelConfig

_MODEL = paths.model

_GROUPS = (_MODEL.moe_router_num_groups, _MODEL.moe_router_group_topk)
_BALANCE = (_MODEL.moe_router_load_balancing_type, _MODEL.moe_aux_loss_coeff)


def with_experts(holds: Callable[[ModelConfig], bool]) -> Callable[[Case], bool]:
    """Make a predicate on any case of one on models with experts; it holds for all others."""
    return lambda case: not case.config.model.num_experts or holds(case.config.model)


def expert_counts(model: ModelConfig) -> list[int]:
    """The numbers of experts that layers have, each once, in order."""
    return sorted({count for count in model.num_experts if count > 1})


def _groups_set(model: ModelConfig) -> bool:
    return model.moe_router_num_groups is not None and model.moe_router_group_topk is not None


def _groups_divide(model: ModelConfig) -> bool:
    groups = model.moe_router_num_groups
    return groups is None or all(count % groups == 0 for count in expert_counts(model))


def _group_choice_fits(model: ModelConfig) -> bool:
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    return groups is None or chosen is None or chosen <= groups


def _chosen_groups_suffice(model: ModelConfig) -> bool:
    if not (_groups_set(model) and _groups_divide(model) and _group_choice_fits(model)):
        return True
    return model.moe_router_topk <= _allowed(model)


def _allowed(model: ModelConfig) -> int:
    """Experts in the groups that a token chooses, in the layer with the fewest."""
    fewest = min(expert_counts(model), default=0)
    return fewest // (model.moe_router_num_groups or 1) * (model.moe_router_group_topk or 1)


def _balance_is_one(model: ModelConfig) -> bool:
    kinds = model.moe_router_load_balancing_type
    return len(set(kinds)) == len(kinds) and (len(kinds) == 1 or not {"none", "sinkhorn"} & set(kinds))


_BESIDE_ASSIGNMENT: tuple[Any, ...] = (
    *(f"model.moe_router_{name}" for name in ("num_groups", "enable_expert_bias", "topk_scaling_factor")),
    *(_MODEL.moe_router_sampling, _MODEL.moe_expert_capacity_factor, _MODEL.moe_n_hash_layers),
)


def _assigns_alone(model: ModelConfig) -> bool:
    fields = (FIELD_BY_PATH[path] for path in _BESIDE_ASSIGNMENT)
    return not model.assigns or (
        not any(model.moe_aux_loss_coeff) and all(getattr(model, f.name) == f.default for f in fields)
    )


ROUTING_RULES: tuple[Rule, ...] = (
    Rule(
        "topk_within_experts",
        (_MODEL.moe_router_topk, _MODEL.num_experts),
        "`moe_router_topk` must be at most `num_experts` of every layer",
        "lower `--moe-router-topk` or add experts",
        with_experts(lambda model: all(model.moe_router_topk <= count for count in expert_counts(model))),
    ),
    Rule(
        "router_groups_divide_experts",
        (_GROUPS[0], _MODEL.num_experts),
        "`moe_router_num_groups` must divide `num_experts` of every layer",
        "choose a divisor",
        with_experts(_groups_divide),
    ),
    Rule(
        "group_choice_within_groups",
        _GROUPS,
        "`moe_router_group_topk` must be at most `moe_router_num_groups`",
        "lower it",
        with_experts(_group_choice_fits),
    ),
    Rule(
        "group_choice_divides_topk",
        (_GROUPS[1], _MODEL.moe_router_topk),
        "`moe_router_group_topk` must divide `moe_router_topk`: a group's score is the sum of its best "
        "topk / group_topk experts",
        "choose a divisor",
        with_experts(lambda model: model.moe_router_topk % (model.moe_router_group_topk or 1) == 0),
    ),
    Rule(
        "topk_within_groups",
        (_MODEL.moe_router_topk, *_GROUPS, _MODEL.num_experts),
        "`moe_router_topk` must be at most the number of experts in the `moe_router_group_topk` groups that "
        "a token chooses",
        "let it choose more groups, or fewer experts",
        with_experts(_chosen_groups_suffice),
        lambda c: f"they have {_allowed(c.config.model)} experts",
    ),
    Rule(
        "one_expert_needs_its_probability",
        (_MODEL.moe_router_topk, _MODEL.moe_router_pre_softmax, _MODEL.moe_router_score_function),
        "`moe_router_pre_softmax` must be on with softmax scores and `moe_router_topk` 1, or the weight of "
        "the only expert would always be 1",
        "add `--moe-router-pre-softmax`, which is what DeepSpeed does",
        with_experts(
            lambda model: (
                model.moe_router_topk > 1
                or model.moe_router_pre_softmax
                or model.moe_router_score_function != "softmax"
                # A way to balance that is not offered is refused already, and may have weights of its own.
                or not model.moe_router_load_balancing_type
                or model.assigns
            )
        ),
    ),
    Rule(
        "balance_is_one",
        _BALANCE[:1],
        "`moe_router_load_balancing_type` must name no kind twice, and none and sinkhorn only by themselves",
        "leave the others out",
        with_experts(_balance_is_one),
    ),
    Rule(
        "assignment_alone",
        (*_BALANCE, *_BESIDE_ASSIGNMENT),
        "`moe_router_load_balancing_type` sinkhorn must balance alone: without losses, groups, a bias, "
        "noise, a factor of weights, a capacity or routing by ids",
        "leave the others out, or choose by losses",
        with_experts(_assigns_alone),
    ),
    Rule(
        "hash_layers_have_experts",
        (_MODEL.moe_n_hash_layers, _MODEL.moe_layer_freq, _MODEL.expert_interval, _MODEL.num_experts),
        "the first `moe_n_hash_layers` layers must have experts, one of them at least",
        "raise it, or leave it out",
        with_experts(lambda m: not m.moe_n_hash_layers or any(m.experts_by_layer[: m.moe_n_hash_layers])),
    ),
    Rule(
        "balance_has_coefficients",
        _BALANCE,
        "`moe_aux_loss_coeff` must have one number for each `moe_router_load_balancing_type`",
        "name as many",
        with_experts(
            lambda model: len(model.moe_router_load_balancing_type) == len(model.moe_aux_loss_coeff)
        ),
    ),
)
