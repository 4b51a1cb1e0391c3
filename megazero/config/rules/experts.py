"""Rules about mixtures of experts: which layers have them, which ranks hold them, and what they begin as.

Like those of `routing.py`, they hold for a model without experts, whose settings about them have no effect
(`notes.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.derive import expert_tensor_size
from megazero.config.fields import paths
from megazero.config.rules.routing import expert_counts, with_experts
from megazero.config.rules.rule import Case, Rule
from megazero.config.tree.experts import is_frequency
from megazero.config.tree.model import ModelConfig

_MODEL, _PARALLEL = paths.model, paths.parallel

_PLACEMENT = (_MODEL.moe_layer_freq, _MODEL.expert_interval)
_TENSOR_RANKS = _PARALLEL.tensor_model_parallel_size


def _ranks_of_stage(case: Case) -> int | None:
    """Ranks of a pipeline stage; None while the world size is unknown or does not factor."""
    if case.world_size is None or case.data_parallel is None:
        return None
    return case.world_size // case.config.parallel.pipeline_model_parallel_size


def _fill_stage(case: Case) -> bool:
    ranks = _ranks_of_stage(case)
    if ranks is None or not case.config.model.num_experts:
        return True
    return ranks % (case.config.parallel.expert_model_parallel_size * expert_tensor_size(case.config)) == 0


def _stage_clause(case: Case) -> str:
    of_experts = case.config.parallel.expert_model_parallel_size * expert_tensor_size(case.config)
    return f"a stage has {_ranks_of_stage(case)} ranks, and a multiple of {of_experts} is needed"


def _dense_widths_divide(case: Case) -> bool:
    """Whether the widths of shared and residual MLPs divide by the tensor-parallel size."""
    model, ranks = case.config.model, case.config.parallel.tensor_model_parallel_size
    if not model.num_experts:
        return True
    residual = model.mlp_type == "residual" and model.expert_ffn_size % ranks
    return (model.moe_shared_expert_intermediate_size or 0) % ranks == 0 and not residual


LAYOUT_RULES: tuple[Rule, ...] = (
    Rule(
        "experts_over_expert_ranks",
        (_MODEL.num_experts, _PARALLEL.expert_model_parallel_size),
        "`num_experts` of every layer must be a multiple of `expert_model_parallel_size`",
        "change one of the two",
        lambda c: all(
            count % c.config.parallel.expert_model_parallel_size == 0
            for count in expert_counts(c.config.model)
        ),
    ),
    Rule(
        "expert_ranks_fill_stages",
        (_PARALLEL.expert_model_parallel_size, _PARALLEL.expert_tensor_parallel_size, _TENSOR_RANKS),
        "the ranks of a pipeline stage must be a multiple of `expert_model_parallel_size` x "
        "`expert_tensor_parallel_size`, which is the tensor-parallel size if it is not set",
        "lower one of the two, or start more ranks",
        _fill_stage,
        _stage_clause,
    ),
    Rule(
        "expert_width_over_expert_tensor_ranks",
        (_MODEL.moe_ffn_hidden_size, _PARALLEL.expert_tensor_parallel_size, _TENSOR_RANKS),
        "an expert's inner width must be a multiple of `expert_tensor_parallel_size`, which is the "
        "tensor-parallel size if it is not set",
        "set `--moe-ffn-hidden-size` to a multiple, or `--expert-tensor-parallel-size 1`",
        lambda c: (
            not c.config.model.num_experts
            or c.config.model.expert_ffn_size % expert_tensor_size(c.config) == 0
        ),
        lambda c: f"the inner width is {c.config.model.expert_ffn_size}",
    ),
    Rule(
        "dense_width_over_tensor_ranks",
        (_MODEL.moe_shared_expert_intermediate_size, _MODEL.mlp_type, _TENSOR_RANKS),
        "the inner width of shared experts, and of the MLP beside residual experts, must be a multiple of "
        "`tensor_model_parallel_size`",
        "choose a multiple",
        _dense_widths_divide,
    ),
)


def _pattern_fits(model: ModelConfig) -> bool:
    pattern = model.moe_layer_freq
    if pattern is None or is_frequency(pattern):
        return True
    return len(pattern) == model.num_layers and set(pattern) <= {0, 1}


def _pattern_clause(case: Case) -> str:
    pattern = case.config.model.moe_layer_freq or ()
    return f"it has {len(pattern)} items, and there are {case.config.model.num_layers} layers"


def _places_counted(model: ModelConfig) -> bool:
    return not _pattern_fits(model) or len(model.num_experts) in (1, model.expert_places)


PLACEMENT_RULES: tuple[Rule, ...] = (
    Rule(
        "layer_pattern_is_whole",
        (_PLACEMENT[0], _MODEL.num_layers),
        "`moe_layer_freq` must be one number above 0, or a 0 or 1 for each layer",
        "correct it",
        with_experts(_pattern_fits),
        _pattern_clause,
    ),
    Rule(
        "some_layer_has_experts",
        (_MODEL.num_layers, *_PLACEMENT),
        "at least one layer must have experts with `num_experts`",
        "place them in some layer, or leave out `--num-experts`",
        with_experts(lambda model: not _pattern_fits(model) or model.expert_places > 0),
    ),
    Rule(
        "pyramid_has_all_layers",
        (_MODEL.num_experts, *_PLACEMENT),
        "`num_experts` must be one number, or one for each layer with experts",
        "name as many, or place the experts otherwise (Megatron-DeepSpeed's default is "
        "`--expert-interval 2`)",
        with_experts(lambda model: model.expert_places == 0 or _places_counted(model)),
        lambda c: f"layers with experts: {c.config.model.expert_places}",
    ),
)

EXPERT_RULES: tuple[Rule, ...] = (*LAYOUT_RULES, *PLACEMENT_RULES)


def _upcycled(holds: Callable[[ModelConfig], bool]) -> Callable[[Case], bool]:
    """Make a predicate on any case of one on models that upcycle experts; it holds for all others."""
    return lambda case: not case.config.checkpoint.moe_use_upcycling or with_experts(holds)(case)


def _weights_sum_to_one(model: ModelConfig) -> bool:
    if model.moe_router_score_function == "softmax":
        return not model.moe_router_pre_softmax
    return model.moe_router_topk > 1


UPCYCLING_RULES: tuple[Rule, ...] = (
    Rule(
        "upcycled_weights_sum_to_one",
        (_MODEL.moe_router_pre_softmax, _MODEL.moe_router_score_function, _MODEL.moe_router_topk),
        "the weights of a token's experts must sum to one with `moe_use_upcycling`, so that copies of one "
        "MLP compute what it does: `moe_router_pre_softmax` must be off with softmax scores, and "
        "`moe_router_topk` above 1 with sigmoid scores",
        "take the softmax after the choice, with `--moe-router-topk 2` or more",
        _upcycled(_weights_sum_to_one),
    ),
    Rule(
        "upcycled_experts_have_the_mlp_s_width",
        (_MODEL.moe_ffn_hidden_size, _MODEL.ffn_hidden_size),
        "`moe_ffn_hidden_size` must be the MLP's width with `moe_use_upcycling`",
        "leave it out",
        _upcycled(lambda model: model.expert_ffn_size == model.ffn_size),
        lambda c: f"the MLP's width is {c.config.model.ffn_size}",
    ),
)
