"""Rules about mixtures of experts: which layers have them, which ranks hold them, and what they begin as.

A model without experts keeps all of them, and those of `routing.py`: there, settings about experts have no
effect (`notes.py`).
"""

from __future__ import annotations

from megazero.config.derive import expert_tensor_size
from megazero.config.fields import paths
from megazero.config.rules.routing import expert_counts, has_experts
from megazero.config.rules.rule import Case, rule
from megazero.config.tree.experts import is_frequency

_MODEL, _PARALLEL = paths.model, paths.parallel

_PLACEMENT = (_MODEL.moe_layer_freq, _MODEL.expert_interval)
_TENSOR_RANKS = _PARALLEL.tensor_model_parallel_size


def _ranks_of_stage(case: Case) -> int | None:
    """Ranks of a pipeline stage; None while the world size is unknown or does not factor."""
    if case.world_size is None or case.data_parallel is None:
        return None
    return case.world_size // case.parallel.pipeline_model_parallel_size


def _stage_clause(case: Case) -> str:
    of_experts = case.parallel.expert_model_parallel_size * expert_tensor_size(case.config)
    return f"a stage has {_ranks_of_stage(case)} ranks, and a multiple of {of_experts} is needed"


@rule((_MODEL.num_experts, _PARALLEL.expert_model_parallel_size), "change one of the two")
def experts_over_expert_ranks(case: Case) -> bool:
    """`num_experts` of every layer must be a multiple of `expert_model_parallel_size`"""
    return all(count % case.parallel.expert_model_parallel_size == 0 for count in expert_counts(case.model))


@rule(
    (_PARALLEL.expert_model_parallel_size, _PARALLEL.expert_tensor_parallel_size, _TENSOR_RANKS),
    "lower one of the two, or start more ranks",
    where=has_experts,
    detail=_stage_clause,
)
def expert_ranks_fill_stages(case: Case) -> bool:
    """the ranks of a pipeline stage must be a multiple of `expert_model_parallel_size` x
    `expert_tensor_parallel_size`, which is the tensor-parallel size if it is not set"""
    ranks = _ranks_of_stage(case)
    return (
        ranks is None
        or ranks % (case.parallel.expert_model_parallel_size * expert_tensor_size(case.config)) == 0
    )


@rule(
    (_MODEL.moe_ffn_hidden_size, _PARALLEL.expert_tensor_parallel_size, _TENSOR_RANKS),
    "set `--moe-ffn-hidden-size` to a multiple, or `--expert-tensor-parallel-size 1`",
    where=has_experts,
    detail=lambda c: f"the inner width is {c.model.expert_ffn_size}",
)
def expert_width_over_expert_tensor_ranks(case: Case) -> bool:
    """an expert's inner width must be a multiple of `expert_tensor_parallel_size`, which is the
    tensor-parallel size if it is not set"""
    return case.model.expert_ffn_size % expert_tensor_size(case.config) == 0


@rule(
    (_MODEL.moe_shared_expert_intermediate_size, _MODEL.mlp_type, _TENSOR_RANKS),
    "choose a multiple",
    where=has_experts,
)
def dense_width_over_tensor_ranks(case: Case) -> bool:
    """the inner width of shared experts, and of the MLP beside residual experts, must be a multiple of
    `tensor_model_parallel_size`"""
    model, ranks = case.model, case.parallel.tensor_model_parallel_size
    residual = model.mlp_type == "residual" and model.expert_ffn_size % ranks
    return (model.moe_shared_expert_intermediate_size or 0) % ranks == 0 and not residual


def _pattern_clause(case: Case) -> str:
    pattern = case.model.moe_layer_freq or ()
    return f"it has {len(pattern)} items, and there are {case.model.num_layers} layers"


@rule((_PLACEMENT[0], _MODEL.num_layers), "correct it", where=has_experts, detail=_pattern_clause)
def layer_pattern_is_whole(case: Case) -> bool:
    """`moe_layer_freq` must be one number above 0, or a 0 or 1 for each layer"""
    pattern = case.model.moe_layer_freq
    if pattern is None or is_frequency(pattern):
        return True
    return len(pattern) == case.model.num_layers and set(pattern) <= {0, 1}


@rule(
    (_MODEL.num_layers, *_PLACEMENT),
    "place them in some layer, or leave out `--num-experts`",
    where=has_experts,
)
def some_layer_has_experts(case: Case) -> bool:
    """at least one layer must have experts with `num_experts`"""
    return not layer_pattern_is_whole.holds(case) or case.model.expert_places > 0


@rule(
    (_MODEL.num_experts, *_PLACEMENT),
    "name as many, or place the experts otherwise (Megatron-DeepSpeed's default is `--expert-interval 2`)",
    where=has_experts,
    detail=lambda c: f"layers with experts: {c.model.expert_places}",
)
def pyramid_has_all_layers(case: Case) -> bool:
    """`num_experts` must be one number, or one for each layer with experts"""
    places = case.model.expert_places
    return places == 0 or not layer_pattern_is_whole.holds(case) or len(case.model.num_experts) in (1, places)


def _upcycles(case: Case) -> bool:
    return case.config.checkpoint.moe_use_upcycling and has_experts(case)


@rule(
    (_MODEL.moe_router_pre_softmax, _MODEL.moe_router_score_function, _MODEL.moe_router_topk),
    "take the softmax after the choice, with `--moe-router-topk 2` or more",
    where=_upcycles,
)
def upcycled_weights_sum_to_one(case: Case) -> bool:
    """the weights of a token's experts must sum to one with `moe_use_upcycling`, so that copies of one MLP
    compute what it does: `moe_router_pre_softmax` must be off with softmax scores, and `moe_router_topk`
    above 1 with sigmoid scores"""
    model = case.model
    if model.moe_router_score_function == "softmax":
        return not model.moe_router_pre_softmax
    return model.moe_router_topk > 1


@rule(
    (_MODEL.moe_ffn_hidden_size, _MODEL.ffn_hidden_size),
    "leave it out",
    where=_upcycles,
    detail=lambda c: f"the MLP's width is {c.model.ffn_size}",
)
def upcycled_experts_have_the_mlp_s_width(case: Case) -> bool:
    """`moe_ffn_hidden_size` must be the MLP's width with `moe_use_upcycling`"""
    return case.model.expert_ffn_size == case.model.ffn_size
