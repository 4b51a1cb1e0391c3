"""The common tables of architectures with a mixture of experts: expert tensors, settings and conditions.

`save_pretrained` writes the matrices of each expert as tensors of their own. transformers 5 stacks them in
memory, and a state that was saved without its help has the stacked ones, so both forms are read; the first is
written. The coefficients of transformers' balancing loss are neither read nor written, because it is another
loss: it pools all layers and counts each of a token's choices in full.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import TensorRule, with_experts
from megazero.formats.hf.architecture import COMMON_LIMITS, FieldPair, Limit
from megazero.formats.hf.llama import EVEN_HEADS, GATE, LLAMA, UP

_OURS = "layers.{i}.mlp"
_UP, _DOWN = f"{_OURS}.experts.up.weight", f"{_OURS}.experts.down.weight"
OURS_FIXED = (
    *LLAMA.ours_fixed,
    ("add_bias_linear", False),
    ("mlp_type", "standard"),
    ("moe_router_score_function", "softmax"),
)
ALIKE_EXPERTS = (
    Limit(lambda m: bool(m.num_experts), "there must be experts"),
    Limit(
        lambda m: len(set(m.num_experts)) <= 1, "all layers with experts must have the same number of them"
    ),
    Limit(
        lambda m: not m.num_experts or m.moe_router_topk <= min(m.num_experts),
        "a token must not be sent to more experts than there are",
    ),
)
NO_DROPS = Limit(
    lambda m: m.moe_expert_capacity_factor is None and m.moe_eval_capacity_factor is None,
    "nothing may limit how many tokens an expert takes, as transformers drops none; `--ignore-capacity` "
    "writes it all the same",
)
EVERYWHERE = Limit(lambda m: m.expert_places == m.num_layers, "all layers must have experts")
UNSHARED = Limit(lambda m: m.moe_shared_expert_intermediate_size is None, "there must be no shared experts")
LIMITS = (
    *COMMON_LIMITS,
    EVEN_HEADS,
    *ALIKE_EXPERTS,
    Limit(
        lambda m: not m.moe_router_enable_expert_bias, "no bias of the experts may take part in their choice"
    ),
    Limit(lambda m: m.moe_router_num_groups in (None, 1), "experts must be chosen from all, not from groups"),
    Limit(
        lambda m: m.moe_router_topk_scaling_factor in (None, 1.0), "the experts' weights must not be scaled"
    ),
    NO_DROPS,
)
CHOSEN = FieldPair("num_experts_per_tok", "moe_router_topk", 4)
"""The number of experts that a token is sent to."""
OVER_CHOSEN = FieldPair(
    "norm_topk_prob", "moe_router_pre_softmax", False, words=((True, False), (False, True))
)
"""Whether a token's gates add up to 1: the softmax is then over the chosen experts, not over all."""
GROUPS = (
    FieldPair("n_group", "moe_router_num_groups", None, int),
    FieldPair("topk_group", "moe_router_group_topk", None, int),
)
"""The number of groups of experts, and of those that a token may choose from."""
SCALED = FieldPair(
    "routed_scaling_factor",
    "moe_router_topk_scaling_factor",
    2.5,
    resolved=lambda m: m.moe_router_topk_scaling_factor or 1.0,
    taken=lambda factor: None if factor == 1 else factor,
)
SEVERAL_CHOSEN = Limit(lambda m: m.moe_router_topk > 1, "a token must be sent to more experts than one")
UNGATED = Limit(lambda m: not m.moe_shared_expert_gate, "shared experts must have no gate")


def groups_scored_by(best: int) -> Limit:
    """The condition that a group's score is the sum of its `best` best experts here, as in transformers."""
    return Limit(
        lambda m: (
            (m.moe_router_num_groups or 1) == 1 or m.moe_router_topk // (m.moe_router_group_topk or 1) == best
        ),
        f"a token must be sent to {best} experts of each group that it chooses, or there must be no groups",
    )


def width_of_experts(default: int) -> FieldPair:
    """The setting of an expert's width if every layer has experts, and `ffn_hidden_size` has no other use."""
    return FieldPair("intermediate_size", "ffn_hidden_size", default, resolved="expert_ffn_size")


def number_of_experts(theirs: str, default: int) -> FieldPair:
    """The setting for the number of experts, which is a tuple, by layer, in `ModelConfig`."""
    return FieldPair(
        theirs,
        "num_experts",
        default,
        resolved=lambda model: model.num_experts[0],
        taken=lambda number: (number,),
    )


def expert_rules(block: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    """Rules for the router and the three matrices of each expert.

    Args:
        block: the beginning of their names.
        gate, up, down: the names of an expert's matrices.
    """
    router = TensorRule(f"{_OURS}.router.weight", "x h", f"{block}.gate.weight", "x h")
    expert = f"{block}.experts.{{x}}"
    rules = (
        router,
        TensorRule(_UP, "x 2 m h", f"{expert}.{gate}.weight", "(x 2 m) h", GATE),
        TensorRule(_UP, "x 2 m h", f"{expert}.{up}.weight", "(x 2 m) h", UP),
        TensorRule(_DOWN, "x h m", f"{expert}.{down}.weight", "(x h) m"),
    )
    return tuple(replace(rule, layer=with_experts) for rule in rules)


def stacked_rules(block: str) -> tuple[TensorRule, ...]:
    """Rules for the same matrices, stacked over experts; each has the rows of its gate, then of its value."""
    rules = (
        TensorRule(_UP, "x 2 m h", f"{block}.experts.gate_up_proj", "x (2 m) h"),
        TensorRule(_DOWN, "x h m", f"{block}.experts.down_proj", "x h m"),
    )
    return tuple(replace(rule, layer=with_experts) for rule in rules)


def shared_rules(block: str) -> tuple[TensorRule, ...]:
    """Rules for the shared experts, whose names begin with `block`."""
    ours = f"{_OURS}.shared"
    return (
        TensorRule(f"{ours}.up.weight", "2 w h", f"{block}.gate_proj.weight", "(2 w) h", GATE),
        TensorRule(f"{ours}.up.weight", "2 w h", f"{block}.up_proj.weight", "(2 w) h", UP),
        TensorRule(f"{ours}.down.weight", "h w", f"{block}.down_proj.weight", "h w"),
    )
