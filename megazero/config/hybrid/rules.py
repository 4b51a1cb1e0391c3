"""Rules about hybrid models: the pattern of their layers, and the heads of their state-space ones."""

from __future__ import annotations

from collections import Counter

from megazero.config.fields import paths
from megazero.config.hybrid.settings import EXPERTS, MAMBA
from megazero.config.rules.rule import Case, Rule

_MODEL, _PARALLEL = paths.model, paths.parallel

_RATIOS = (_MODEL.hybrid_attention_ratio, _MODEL.hybrid_mlp_ratio)
_HEADS = (_MODEL.mamba_num_heads, _MODEL.mamba_head_dim, _MODEL.hidden_size)


def _sound_ratios(case: Case) -> bool:
    return case.config.model.hybrid_attention_ratio + case.config.model.hybrid_mlp_ratio <= 1


def _same_counts(case: Case) -> bool:
    model = case.config.model
    if not model.hybrid_layer_pattern or not (model.hybrid_attention_ratio or model.hybrid_mlp_ratio):
        return True
    return not _sound_ratios(case) or Counter(model.hybrid_layer_pattern) == Counter(model.letters_by_ratio)


def _whole_heads(case: Case) -> bool:
    model = case.config.model
    whole = model.mamba_num_heads or 2 * model.hidden_size % model.mamba_head_dim == 0
    return MAMBA not in (model.layer_kinds or "") or bool(whole)


def _groups_over_ranks(case: Case) -> bool:
    model, ranks = case.config.model, case.config.parallel.tensor_model_parallel_size
    return model.mamba_heads is None or model.mamba_num_groups % ranks == 0


def _experts_where_named(case: Case) -> bool:
    model = case.config.model
    return model.layer_kinds is None or (EXPERTS in model.layer_kinds) == bool(model.num_experts)


HYBRID_RULES: tuple[Rule, ...] = (
    Rule(
        "hybrid_pattern_length",
        (_MODEL.hybrid_layer_pattern, _MODEL.num_layers),
        "`hybrid_layer_pattern` must have a letter for each of `num_layers`",
        "change one of the two, or leave `--num-layers` out",
        lambda c: (
            c.config.model.hybrid_layer_pattern is None
            or len(c.config.model.hybrid_layer_pattern) == c.config.model.num_layers
        ),
    ),
    Rule(
        "hybrid_ratios_sum",
        _RATIOS,
        "the shares of attention and of MLPs must add up to at most 1",
        "lower one of the two",
        _sound_ratios,
    ),
    Rule(
        "hybrid_pattern_keeps_ratios",
        (_MODEL.hybrid_layer_pattern, *_RATIOS),
        "`hybrid_layer_pattern` must have as many layers of each kind as the ratios ask for",
        "leave the ratios out",
        _same_counts,
    ),
    Rule(
        "hybrid_experts",
        (_MODEL.hybrid_layer_pattern, _MODEL.num_experts),
        "layers of experts (E) must be in the pattern of a hybrid model with experts, and in no other",
        "name them in `--hybrid-layer-pattern`, and give `--num-experts`",
        _experts_where_named,
    ),
    Rule(
        "mamba_whole_heads",
        _HEADS,
        "twice `hidden_size` must be a multiple of `mamba_head_dim` unless `mamba_num_heads` is given",
        "set `--mamba-num-heads`",
        _whole_heads,
    ),
    Rule(
        "mamba_heads_in_groups",
        (_MODEL.mamba_num_groups, *_HEADS),
        "the heads of a Mamba-2 layer must be a multiple of `mamba_num_groups`",
        "change one of the two",
        lambda c: (
            not _whole_heads(c) or (c.config.model.mamba_heads or 0) % c.config.model.mamba_num_groups == 0
        ),
        lambda c: f"there are {c.config.model.mamba_heads}",
    ),
    Rule(
        "mamba_groups_over_tensor_ranks",
        (_MODEL.mamba_num_groups, _PARALLEL.tensor_model_parallel_size),
        "`mamba_num_groups` must be a multiple of `tensor_model_parallel_size`",
        "use more groups or fewer tensor-parallel ranks",
        _groups_over_ranks,
    ),
)
