"""Rules about upcycling: what must hold so that a model with experts begins as the dense one does."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, Rule
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig

_MODEL = paths.model

_TOPK = _MODEL.moe_router_topk


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
        "upcycled_weights_sum_to_one",
        (_MODEL.moe_router_pre_softmax, _MODEL.moe_router_score_function, _TOPK),
        "the weights of a token's experts must sum to one with `moe_use_upcycling`, so that copies of one "
        "MLP compute what it does: `moe_router_pre_softmax` must be off with softmax scores, and "
        "`moe_router_topk` above 1 with sigmoid scores",
        "take the softmax after the choice, with `--moe-router-topk 2` or more",
        _experts_upcycled(_weights_sum_to_one),
    ),
    Rule(
        "upcycled_experts_have_the_mlp_s_width",
        (_MODEL.moe_ffn_hidden_size, _MODEL.ffn_hidden_size),
        "`moe_ffn_hidden_size` must be the MLP's width with `moe_use_upcycling`",
        "leave it out",
        _experts_upcycled(lambda model: model.expert_ffn_size == model.ffn_size),
        lambda c: f"the MLP's width is {c.config.model.ffn_size}",
    ),
)
