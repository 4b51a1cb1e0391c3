"""Rules about how tokens are routed to experts, how the experts are balanced, and how much they take."""

from __future__ import annotations

from megazero.config.fields import FIELD_BY_PATH, paths
from megazero.config.rules.rule import Case, rule
from megazero.config.tree.model import ModelConfig

_MODEL = paths.model

_GROUPS = (_MODEL.moe_router_num_groups, _MODEL.moe_router_group_topk)
_BALANCE = (_MODEL.moe_router_load_balancing_type, _MODEL.moe_aux_loss_coeff)


def has_experts(case: Case) -> bool:
    """Whether the model has experts."""
    return bool(case.model.num_experts)


def expert_counts(model: ModelConfig) -> list[int]:
    """The different numbers of experts of the layers with experts, in ascending order."""
    return sorted({count for count in model.num_experts if count > 1})


def _allowed(model: ModelConfig) -> int:
    """Experts in the groups that a token chooses, in the layer with the fewest experts."""
    fewest = min(expert_counts(model), default=0)
    return fewest // (model.moe_router_num_groups or 1) * (model.moe_router_group_topk or 1)


_BESIDE_ASSIGNMENT = (
    *(f"model.moe_router_{name}" for name in ("num_groups", "enable_expert_bias", "topk_scaling_factor")),
    *("model.moe_router_sampling", "model.moe_expert_capacity_factor", "model.moe_n_hash_layers"),
)


@rule(
    (_MODEL.moe_router_topk, _MODEL.num_experts),
    "lower `--moe-router-topk` or add experts",
    where=has_experts,
)
def topk_within_experts(case: Case) -> bool:
    """`moe_router_topk` must be at most `num_experts` of every layer"""
    model = case.model
    return all(model.moe_router_topk <= count for count in expert_counts(model))


@rule((_GROUPS[0], _MODEL.num_experts), "choose a divisor", where=has_experts)
def router_groups_divide_experts(case: Case) -> bool:
    """`moe_router_num_groups` must divide `num_experts` of every layer"""
    groups = case.model.moe_router_num_groups
    return groups is None or all(count % groups == 0 for count in expert_counts(case.model))


@rule(_GROUPS, "lower it", where=has_experts)
def group_choice_within_groups(case: Case) -> bool:
    """`moe_router_group_topk` must be at most `moe_router_num_groups`"""
    groups, chosen = case.model.moe_router_num_groups, case.model.moe_router_group_topk
    return groups is None or chosen is None or chosen <= groups


@rule((_GROUPS[1], _MODEL.moe_router_topk), "choose a divisor", where=has_experts)
def group_choice_divides_topk(case: Case) -> bool:
    """`moe_router_group_topk` must divide `moe_router_topk`: a group's score is the sum of its best topk /
    group_topk experts"""
    model = case.model
    return model.moe_router_topk % (model.moe_router_group_topk or 1) == 0


@rule(
    (_MODEL.moe_router_topk, *_GROUPS, _MODEL.num_experts),
    "let it choose more groups, or fewer experts",
    where=has_experts,
    detail=lambda c: f"they have {_allowed(c.model)} experts",
)
def topk_within_groups(case: Case) -> bool:
    """`moe_router_topk` must be at most the number of experts in the `moe_router_group_topk` groups that a
    token chooses"""
    model = case.model
    if None in (model.moe_router_num_groups, model.moe_router_group_topk):
        return True
    if not (router_groups_divide_experts.holds(case) and group_choice_within_groups.holds(case)):
        return True
    return model.moe_router_topk <= _allowed(model)


@rule(
    (_MODEL.moe_router_topk, _MODEL.moe_router_pre_softmax, _MODEL.moe_router_score_function),
    "add `--moe-router-pre-softmax`, which is what DeepSpeed does",
    where=has_experts,
)
def one_expert_needs_its_probability(case: Case) -> bool:
    """`moe_router_pre_softmax` must be on with softmax scores and `moe_router_topk` 1, or the weight of the
    only expert would always be 1"""
    model = case.model
    return (
        model.moe_router_topk > 1
        or model.moe_router_pre_softmax
        or model.moe_router_score_function != "softmax"
        # A way to balance that is not offered is refused already, and may have weights of its own.
        or not model.moe_router_load_balancing_type
        or model.assigns
    )


@rule(_BALANCE[:1], "leave the others out", where=has_experts)
def balance_is_one(case: Case) -> bool:
    """`moe_router_load_balancing_type` must name no kind twice, and none and sinkhorn only by themselves"""
    model = case.model
    kinds = model.moe_router_load_balancing_type
    return len(set(kinds)) == len(kinds) and (len(kinds) == 1 or not {"none", "sinkhorn"} & set(kinds))


@rule((*_BALANCE, *_BESIDE_ASSIGNMENT), "leave the others out, or choose by losses", where=has_experts)
def assignment_alone(case: Case) -> bool:
    """`moe_router_load_balancing_type` sinkhorn must balance alone: without losses, groups, a bias, noise, a
    factor of weights, a capacity or routing by ids"""
    model = case.model
    fields = (FIELD_BY_PATH[path] for path in _BESIDE_ASSIGNMENT)
    return not model.assigns or (
        not any(model.moe_aux_loss_coeff) and all(getattr(model, f.name) == f.default for f in fields)
    )


@rule(
    (_MODEL.moe_n_hash_layers, _MODEL.moe_layer_freq, _MODEL.expert_interval, _MODEL.num_experts),
    "raise it, or leave it out",
    where=has_experts,
)
def hash_layers_have_experts(case: Case) -> bool:
    """at least one of the first `moe_n_hash_layers` layers must have experts"""
    model = case.model
    return not model.moe_n_hash_layers or any(model.experts_by_layer[: model.moe_n_hash_layers])


@rule(_BALANCE, "name as many", where=has_experts)
def balance_has_coefficients(case: Case) -> bool:
    """`moe_aux_loss_coeff` must have one number for each `moe_router_load_balancing_type`"""
    model = case.model
    return len(model.moe_router_load_balancing_type) == len(model.moe_aux_loss_coeff)
