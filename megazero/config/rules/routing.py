"""Rules about how tokens are routed to experts, how the experts are balanced, and how much they take."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.rules.rule import Case, Rule
from megazero.config.tree import ModelConfig

_EXPERTS = "model.num_experts"
_TOPK = "model.moe_router_topk"
_GROUPS = ("model.moe_router_num_groups", "model.moe_router_group_topk")
_SCORES = "model.moe_router_score_function"
_BALANCE = ("model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff")
_CAPACITY = "model.moe_expert_capacity_factor"


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


def _sampling_fits(model: ModelConfig) -> bool:
    wanted = {"none": model.moe_router_topk, "first": 1, "second": 2}
    return wanted[model.moe_router_sampling] == model.moe_router_topk


def _sampled_plainly(model: ModelConfig) -> bool:
    plain = model.moe_router_score_function == "softmax" and model.moe_router_num_groups is None
    return plain or model.moe_router_sampling == "none"


def _balance_is_one(model: ModelConfig) -> bool:
    kinds = model.moe_router_load_balancing_type
    return len(set(kinds)) == len(kinds) and (len(kinds) == 1 or "none" not in kinds)


ROUTER_RULES: tuple[Rule, ...] = (
    Rule(
        "topk_within_experts",
        (_TOPK, _EXPERTS),
        "`moe_router_topk` must be at most `num_experts` of every layer",
        "lower `--moe-router-topk` or add experts",
        with_experts(lambda model: all(model.moe_router_topk <= count for count in expert_counts(model))),
    ),
    Rule(
        "router_groups_complete",
        _GROUPS,
        "`moe_router_num_groups` and `moe_router_group_topk` must be set together",
        "set the other one too",
        with_experts(
            lambda model: (model.moe_router_num_groups is None) == (model.moe_router_group_topk is None)
        ),
        reads=(_EXPERTS,),
    ),
    Rule(
        "router_groups_divide_experts",
        (_GROUPS[0], _EXPERTS),
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
        reads=(_EXPERTS,),
    ),
    Rule(
        "group_choice_divides_topk",
        (_GROUPS[1], _TOPK),
        "`moe_router_group_topk` must divide `moe_router_topk`: a group's score is the sum of its best "
        "topk / group_topk experts",
        "choose a divisor",
        with_experts(lambda model: model.moe_router_topk % (model.moe_router_group_topk or 1) == 0),
        reads=(_EXPERTS,),
    ),
    Rule(
        "topk_within_groups",
        (_TOPK, *_GROUPS, _EXPERTS),
        "`moe_router_topk` must be at most the number of experts in the `moe_router_group_topk` groups that "
        "a token chooses",
        "let it choose more groups, or fewer experts",
        with_experts(_chosen_groups_suffice),
        lambda c: f"they have {_allowed(c.config.model)} experts",
    ),
    Rule(
        "one_expert_needs_its_probability",
        (_TOPK, "model.moe_router_pre_softmax", _SCORES),
        "`moe_router_pre_softmax` must be on with softmax scores and `moe_router_topk` 1, or the weight of "
        "the only expert would always be 1",
        "add `--moe-router-pre-softmax`, which is what DeepSpeed does",
        with_experts(
            lambda model: (
                model.moe_router_topk > 1
                or model.moe_router_pre_softmax
                or model.moe_router_score_function != "softmax"
            )
        ),
        # A way to balance that is not offered is refused already, and may have weights of its own.
        reads=(_EXPERTS, _BALANCE[0]),
    ),
    Rule(
        "expert_bias_needs_sigmoid",
        ("model.moe_router_enable_expert_bias", _SCORES),
        "`moe_router_score_function` must be sigmoid with `moe_router_enable_expert_bias`",
        "add `--moe-router-score-function sigmoid`, or leave out the bias",
        with_experts(
            lambda model: (
                not model.moe_router_enable_expert_bias or model.moe_router_score_function == "sigmoid"
            )
        ),
        reads=(_EXPERTS,),
    ),
    Rule(
        "sampling_fits_topk",
        ("model.moe_router_sampling", _TOPK),
        "`moe_router_topk` must be 1 with `moe_router_sampling` first, and 2 with second",
        "change one of the two",
        with_experts(_sampling_fits),
        reads=(_EXPERTS,),
    ),
    Rule(
        "sampling_is_of_softmax_scores",
        ("model.moe_router_sampling", _SCORES, _GROUPS[0]),
        "`moe_router_sampling` must be none with sigmoid scores or groups",
        "leave one of them out",
        with_experts(_sampled_plainly),
        reads=(_EXPERTS,),
    ),
    Rule(
        "balance_is_one",
        _BALANCE[:1],
        "`moe_router_load_balancing_type` must name no kind twice, and none only by itself",
        "leave the others out",
        with_experts(_balance_is_one),
        reads=(_EXPERTS,),
    ),
    Rule(
        "balance_has_coefficients",
        _BALANCE,
        "`moe_aux_loss_coeff` must have one number for each `moe_router_load_balancing_type`",
        "name as many",
        with_experts(
            lambda model: len(model.moe_router_load_balancing_type) == len(model.moe_aux_loss_coeff)
        ),
        reads=(_EXPERTS,),
    ),
)


CAPACITY_RULES: tuple[Rule, ...] = (
    Rule(
        "evaluation_drops_as_training_does",
        (_CAPACITY, "model.moe_eval_capacity_factor"),
        "`moe_expert_capacity_factor` must be set with `moe_eval_capacity_factor`",
        "add `--moe-expert-capacity-factor`, or leave the other one out: without it no token is dropped",
        with_experts(
            lambda model: (
                model.moe_expert_capacity_factor is not None or model.moe_eval_capacity_factor is None
            )
        ),
        reads=(_EXPERTS,),
    ),
    Rule(
        "padding_needs_a_factor",
        ("model.moe_pad_expert_input_to_capacity", _CAPACITY),
        "`moe_expert_capacity_factor` must be set with `moe_pad_expert_input_to_capacity`",
        "add `--moe-expert-capacity-factor`",
        with_experts(
            lambda model: (
                not model.moe_pad_expert_input_to_capacity or model.moe_expert_capacity_factor is not None
            )
        ),
        reads=(_EXPERTS,),
    ),
    Rule(
        "padding_needs_alltoall",
        ("model.moe_pad_expert_input_to_capacity", "parallel.moe_token_dispatcher_type"),
        "`moe_token_dispatcher_type` must be alltoall with `moe_pad_expert_input_to_capacity`",
        "leave out one of the two; an all-gather moves whole tokens, so there is nothing to pad",
        lambda c: (
            not c.config.model.num_experts
            or not c.config.model.moe_pad_expert_input_to_capacity
            or c.config.parallel.moe_token_dispatcher_type == "alltoall"
        ),
        reads=(_EXPERTS,),
    ),
)

ROUTING_RULES: tuple[Rule, ...] = (*ROUTER_RULES, *CAPACITY_RULES)
