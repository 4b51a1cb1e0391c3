"""Rules about the model's shape, the layout of ranks and the batch."""

from __future__ import annotations

import math

from megazero.config.derive import PipelineShape
from megazero.config.fields import paths
from megazero.config.rules.rule import MOST_INCREMENTS, Case, rule
from megazero.config.stairs import BatchStairs
from megazero.config.steps import BatchRamp
from megazero.config.training_plan import Limits

_BATCH, _MODEL, _PARALLEL, _TRAINING = paths.batch, paths.model, paths.parallel, paths.training

_HEAD_SHAPE = (_MODEL.hidden_size, _MODEL.num_attention_heads, _MODEL.kv_channels)
_MOST_LAYOUTS = 8  # that one message lists
_LARGEST_AXIS = 4096  # ranks along one axis of a listed layout


@rule(
    (
        _MODEL.pad_vocab_size_to,
        _MODEL.vocab_size,
        _MODEL.extra_vocab_size,
        _PARALLEL.tensor_model_parallel_size,
    ),
    "raise it, or leave it out",
)
def padded_vocabulary_fits(case: Case) -> bool:
    """`pad_vocab_size_to` must be a multiple of `tensor_model_parallel_size`, and at least the vocabulary"""
    model, ranks = case.model, case.parallel.tensor_model_parallel_size
    rows = model.pad_vocab_size_to
    return rows is None or (rows % ranks == 0 and rows >= (model.vocab_size or 0) + model.extra_vocab_size)


@rule(_HEAD_SHAPE, "change one of the two or set `--kv-channels`")
def hidden_multiple_of_heads(case: Case) -> bool:
    """`hidden_size` must be a multiple of `num_attention_heads` unless `kv_channels` gives the head width"""
    model = case.model
    if model.kv_channels is not None or model.multi_latent_attention:
        return True
    return model.hidden_size % model.num_attention_heads == 0


@rule((_MODEL.num_query_groups, _MODEL.num_attention_heads), "choose a divisor of the number of heads")
def query_groups_divide_heads(case: Case) -> bool:
    """`num_query_groups` must divide `num_attention_heads`"""
    return case.model.num_attention_heads % case.model.kv_heads == 0


@rule(
    (_MODEL.position_embedding_type, _MODEL.rotary_percent, _MODEL.qk_pos_emb_head_dim, *_HEAD_SHAPE),
    "change the head width, `--rotary-percent`, or `--qk-pos-emb-head-dim` of latent attention",
    detail=lambda c: f"{c.model.rotary_dim} of each head are rotated",
)
def rotary_dim_even(case: Case) -> bool:
    """the rotated part of a head must have an even number of channels, at least 2"""
    model = case.model
    return not model.rotates or (model.rotary_dim >= 2 and model.rotary_dim % 2 == 0)


@rule(
    (
        _MODEL.use_rope_scaling,
        _MODEL.rotary_seq_len_interpolation_factor,
        _MODEL.rope_type,
        _MODEL.multi_latent_attention,
    ),
    "leave out `--use-rope-scaling` or `--rotary-seq-len-interpolation-factor`; beside either, latent "
    "attention needs `--rope-type rope`",
)
def one_rotary_scaling(case: Case) -> bool:
    """rotary positions must be scaled in one way"""
    model = case.model
    divided = model.rotary_seq_len_interpolation_factor is not None
    latent = model.multi_latent_attention and model.scales_by_yarn
    return divided + model.use_rope_scaling + latent <= 1


@rule(
    (_MODEL.rope_low_freq_factor, _MODEL.rope_high_freq_factor, _MODEL.yarn_beta_slow, _MODEL.yarn_beta_fast),
    "give `--rope-high-freq-factor` above `--rope-low-freq-factor`, `--yarn-beta-fast` above "
    "`--yarn-beta-slow`",
)
def rotary_limits_in_order(case: Case) -> bool:
    """the limit of the slow channels must be below that of the fast ones"""
    model = case.model
    llama3_in_order = model.rope_low_freq_factor < model.rope_high_freq_factor
    return llama3_in_order and model.yarn_beta_slow < model.yarn_beta_fast


@rule((_MODEL.max_position_embeddings, _MODEL.seq_length), "raise it or leave it out")
def positions_cover_sequence(case: Case) -> bool:
    """`max_position_embeddings` must be at least `seq_length`"""
    return case.model.positions >= case.model.seq_length


@rule(
    (paths.checkpoint.extend_context, _MODEL.seq_length, _MODEL.position_embedding_type),
    "raise `--rotary-scaling-factor` (YaRN) or `--rope-scaling-factor` (Llama 3)",
    where=lambda c: c.config.checkpoint.extend_context,
    detail=lambda c: f"it is {c.model.scaled_to:,.0f}",
)
def scaling_reaches_extended_context(case: Case) -> bool:
    """with `extend_context`, the scaling factor times the length of the first training must be at least
    `seq_length`"""
    return case.model.scaled_to is None or case.model.scaled_to >= case.model.seq_length


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, min(number, _LARGEST_AXIS) + 1) if number % size == 0]


def _has_attention(case: Case) -> bool:
    return bool(case.model.layers_of("*"))


def _fitting_layouts(case: Case) -> str:
    """List the tensor x pipeline x data parallel layouts that fit the ranks and the model, nearest first."""
    model, parallel = case.model, case.parallel
    world, context = case.world_size or 1, parallel.context_parallel_size
    shapes = model.layer_shapes or (model.layer_size,)
    heads = (model.num_attention_heads, *(shape.groups for shape in shapes)) if model.layers_of("*") else ()
    counts = (*heads, *(shape.width for shape in shapes))
    most_stages = max(1, model.num_layers // PipelineShape.of(case.config).chunks_per_stage)
    fits = [
        (tensor, stages, world // (tensor * stages * context))
        for tensor in _divisors(world)
        for stages in _divisors(world // tensor)
        if stages <= most_stages
        and world % (tensor * stages * context) == 0
        and all(count % tensor == 0 for count in counts)
    ]

    def distance(layout: tuple[int, int, int]) -> float:
        tensor, stages, _ = layout
        return abs(math.log(tensor / parallel.tensor_model_parallel_size)) + abs(
            math.log(stages / parallel.pipeline_model_parallel_size)
        )

    shown = [" x ".join(map(str, layout)) for layout in sorted(fits, key=distance)[:_MOST_LAYOUTS]]
    layouts = f"tensor x pipeline x data parallel can be {', '.join(shown)}" if shown else "no layout fits"
    return f"the world size is {world}: {layouts}"


@rule(
    (
        _PARALLEL.tensor_model_parallel_size,
        _PARALLEL.pipeline_model_parallel_size,
        _PARALLEL.context_parallel_size,
    ),
    "start another number of ranks (torchrun --nproc-per-node; with --check-config set WORLD_SIZE), "
    "or change the layout",
    detail=_fitting_layouts,
)
def world_size_factors(case: Case) -> bool:
    """the world size must be a multiple of tensor x pipeline x context parallel size"""
    return case.world_size is None or case.data_parallel is not None


@rule(
    (_MODEL.num_attention_heads, _PARALLEL.tensor_model_parallel_size),
    "change one of the two",
    where=_has_attention,
)
def heads_over_tensor_ranks(case: Case) -> bool:
    """`num_attention_heads` must be a multiple of `tensor_model_parallel_size`"""
    return case.model.num_attention_heads % case.parallel.tensor_model_parallel_size == 0


@rule(
    (_MODEL.num_query_groups, _PARALLEL.tensor_model_parallel_size),
    "use more query groups or fewer tensor-parallel ranks",
    where=_has_attention,
)
def query_groups_over_tensor_ranks(case: Case) -> bool:
    """`num_query_groups` must be a multiple of `tensor_model_parallel_size`"""
    return (case.model.num_query_groups or 0) % case.parallel.tensor_model_parallel_size == 0


@rule(
    (_MODEL.ffn_hidden_size, _MODEL.hidden_size, _MODEL.activation, _PARALLEL.tensor_model_parallel_size),
    "set `--ffn-hidden-size` to a multiple",
    detail=lambda c: f"the inner width is {c.model.ffn_size}",
)
def ffn_over_tensor_ranks(case: Case) -> bool:
    """the MLP's inner width must be a multiple of `tensor_model_parallel_size`"""
    return case.model.ffn_size % case.parallel.tensor_model_parallel_size == 0


def _batch_unit(case: Case) -> int:
    """Samples of one micro-batch on every replica; on one replica while their number is unknown."""
    return case.config.batch.micro_batch_size * (case.data_parallel or 1)


def _ramp(case: Case) -> BatchRamp | None:
    """The ramp of the batch size; None without one, or while its end is unknown."""
    batch = case.config.batch
    if batch.rampup_batch_size is None or batch.global_batch_size is None:
        return None
    return BatchRamp(*batch.rampup_batch_size, batch.global_batch_size)


def _increments(case: Case) -> int:
    ramp = _ramp(case)
    return 0 if ramp is None else ramp.increments


def _unit_clause(case: Case) -> str:
    replicas = case.data_parallel
    known = f"{replicas} data-parallel ranks" if replicas else "the number of ranks is not considered"
    return f"{known}: a multiple of {_batch_unit(case)} is needed"


_RAMP = (_BATCH.rampup_batch_size, _BATCH.global_batch_size)
_STAIRS = (_BATCH.step_batch_size_schedule,)


def _stairs(case: Case) -> BatchStairs | None:
    stairs = case.config.batch.step_batch_size_schedule
    return BatchStairs.of(stairs, case.model.seq_length) if stairs else None


@rule(
    (_BATCH.global_batch_size, _BATCH.micro_batch_size),
    "change one of the batch sizes or the number of ranks",
    detail=_unit_clause,
)
def global_batch_multiple(case: Case) -> bool:
    """`global_batch_size` must be a multiple of `micro_batch_size` x data-parallel size"""
    return (case.config.batch.global_batch_size or _batch_unit(case)) % _batch_unit(case) == 0


@rule(_RAMP, "start lower")
def ramp_starts_below_global_batch(case: Case) -> bool:
    """`rampup_batch_size` must start at no more than `global_batch_size`"""
    ramp = _ramp(case)
    return ramp is None or ramp.start <= ramp.final


@rule(_RAMP, "choose an increment that divides the distance from its start to the global batch")
def ramp_whole_increments(case: Case) -> bool:
    """`rampup_batch_size` must reach `global_batch_size` in whole increments"""
    ramp = _ramp(case)
    return ramp is None or ramp.start > ramp.final or (ramp.final - ramp.start) % ramp.increment == 0


@rule(_RAMP, "choose a larger increment", detail=lambda c: f"that takes {_increments(c):,}")
def ramp_increments(case: Case) -> bool:
    """`rampup_batch_size` must reach `global_batch_size` in at most 100,000 increments"""
    return _increments(case) <= MOST_INCREMENTS


@rule((_BATCH.rampup_batch_size, _BATCH.micro_batch_size), "choose such multiples", detail=_unit_clause)
def ramp_multiples(case: Case) -> bool:
    """start and increment of `rampup_batch_size` must be multiples of `micro_batch_size` x data-parallel
    size"""
    ramp = case.config.batch.rampup_batch_size
    return ramp is None or (ramp[0] % _batch_unit(case) == 0 and ramp[1] % _batch_unit(case) == 0)


@rule((*_STAIRS, _MODEL.seq_length), "correct it")
def batch_steps_begin_and_rise(case: Case) -> bool:
    """`step_batch_size_schedule` must begin at 0, and each next threshold be at least one sample later"""
    return (stairs := _stairs(case)) is None or stairs.rise


@rule((*_STAIRS, _BATCH.global_batch_size), "leave `--global-batch-size` out")
def batch_steps_end_at_global_batch(case: Case) -> bool:
    """`global_batch_size` must be the last size of `step_batch_size_schedule`"""
    batch = case.config.batch
    return not batch.step_batch_size_schedule or (batch.global_batch_size in (None, batch.final_batch_size))


@rule((*_STAIRS, _BATCH.micro_batch_size), "choose such multiples", detail=_unit_clause)
def batch_steps_multiples(case: Case) -> bool:
    """each size of `step_batch_size_schedule` must be a multiple of `micro_batch_size` x data-parallel
    size"""
    return (stairs := _stairs(case)) is None or not any(size % _batch_unit(case) for size in stairs.sizes)


@rule(
    (_TRAINING.train_samples, _BATCH.micro_batch_size, *_RAMP),
    "train on more samples or lower the batch size",
)
def samples_fill_a_batch(case: Case) -> bool:
    """`train_samples` must suffice for one global batch"""
    steps = case.steps
    if case.config.training.train_samples is None or steps is None:
        return True
    return Limits.of(case.config.training).end(steps).iteration >= 1
