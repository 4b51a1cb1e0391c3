"""Rules about hybrid models: the pattern of their layers, and the heads of their state-space ones."""

from __future__ import annotations

from collections import Counter

from megazero.config.fields import paths
from megazero.config.hybrid.settings import EXPERTS, MAMBA
from megazero.config.rules.rule import Case, rule

_MODEL, _PARALLEL = paths.model, paths.parallel

_RATIOS = (_MODEL.hybrid_attention_ratio, _MODEL.hybrid_mlp_ratio)
_HEADS = (_MODEL.mamba_num_heads, _MODEL.mamba_head_dim, _MODEL.hidden_size)


@rule((_MODEL.hybrid_layer_pattern, _MODEL.num_layers), "change one of the two, or leave `--num-layers` out")
def hybrid_pattern_length(case: Case) -> bool:
    """`hybrid_layer_pattern` must have a letter for each of `num_layers`"""
    pattern = case.model.hybrid_layer_pattern
    return pattern is None or len(pattern) == case.model.num_layers


@rule(_RATIOS, "lower one of the two")
def hybrid_ratios_sum(case: Case) -> bool:
    """the shares of attention and of MLPs must add up to at most 1"""
    return case.model.hybrid_attention_ratio + case.model.hybrid_mlp_ratio <= 1


@rule((_MODEL.hybrid_layer_pattern, *_RATIOS), "leave the ratios out")
def hybrid_pattern_keeps_ratios(case: Case) -> bool:
    """`hybrid_layer_pattern` must have as many layers of each kind as the ratios ask for"""
    model = case.model
    if not model.hybrid_layer_pattern or not (model.hybrid_attention_ratio or model.hybrid_mlp_ratio):
        return True
    if not hybrid_ratios_sum.holds(case):
        return True
    return Counter(model.hybrid_layer_pattern) == Counter(model.letters_by_ratio)


@rule(
    (_MODEL.hybrid_layer_pattern, _MODEL.num_experts),
    "name them in `--hybrid-layer-pattern`, and give `--num-experts`",
)
def hybrid_experts(case: Case) -> bool:
    """layers of experts (E) must be in the pattern of a hybrid model with experts, and in no other"""
    model = case.model
    return model.layer_kinds is None or (EXPERTS in model.layer_kinds) == bool(model.num_experts)


@rule(_HEADS, "set `--mamba-num-heads`")
def mamba_whole_heads(case: Case) -> bool:
    """twice `hidden_size` must be a multiple of `mamba_head_dim` unless `mamba_num_heads` is given"""
    model = case.model
    whole = model.mamba_num_heads or 2 * model.hidden_size % model.mamba_head_dim == 0
    return MAMBA not in (model.layer_kinds or "") or bool(whole)


@rule(
    (_MODEL.mamba_num_groups, *_HEADS),
    "change one of the two",
    detail=lambda c: f"there are {c.model.mamba_heads}",
)
def mamba_heads_in_groups(case: Case) -> bool:
    """the heads of a Mamba-2 layer must be a multiple of `mamba_num_groups`"""
    if not mamba_whole_heads.holds(case):
        return True
    return (case.model.mamba_heads or 0) % case.model.mamba_num_groups == 0


@rule(
    (_MODEL.mamba_num_groups, _PARALLEL.tensor_model_parallel_size),
    "use more groups or fewer tensor-parallel ranks",
)
def mamba_groups_over_tensor_ranks(case: Case) -> bool:
    """`mamba_num_groups` must be a multiple of `tensor_model_parallel_size`"""
    model, ranks = case.model, case.parallel.tensor_model_parallel_size
    return model.mamba_heads is None or model.mamba_num_groups % ranks == 0
