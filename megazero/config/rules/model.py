"""Rules about the model's shape, the layout of ranks and the batch."""

from __future__ import annotations

import math

from megazero.config.derive import PipelineShape
from megazero.config.fields import paths
from megazero.config.rules.rule import MOST_INCREMENTS, Case, Rule
from megazero.config.stairs import BatchStairs
from megazero.config.steps import BatchRamp
from megazero.config.training_plan import Limits

_BATCH, _CHECKPOINT, _MODEL, _PARALLEL, _TRAINING = (
    paths.batch,
    paths.checkpoint,
    paths.model,
    paths.parallel,
    paths.training,
)

_HEAD_SHAPE = (_MODEL.hidden_size, _MODEL.num_attention_heads, _MODEL.kv_channels)
_MOST_LAYOUTS = 8  # named in one message
_LARGEST_AXIS = 4096  # ranks along one axis of a layout that is named


def _scaling_reaches(case: Case) -> bool:
    model = case.config.model
    return model.scaled_to is None or model.scaled_to >= model.seq_length


def _scalings(case: Case) -> int:
    model = case.config.model
    divided = model.rotary_seq_len_interpolation_factor is not None
    latent = model.multi_latent_attention and model.scales_by_yarn
    return divided + model.use_rope_scaling + latent


def _rotary_dim_is_even(case: Case) -> bool:
    model = case.config.model
    return not model.rotates or (model.rotary_dim >= 2 and model.rotary_dim % 2 == 0)


def _padding_fits(case: Case) -> bool:
    model, ranks = case.config.model, case.config.parallel.tensor_model_parallel_size
    rows = model.pad_vocab_size_to
    return rows is None or (rows % ranks == 0 and rows >= (model.vocab_size or 0) + model.extra_vocab_size)


MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "padded_vocabulary_fits",
        (
            _MODEL.pad_vocab_size_to,
            *(_MODEL.vocab_size, _MODEL.extra_vocab_size, _PARALLEL.tensor_model_parallel_size),
        ),
        "`pad_vocab_size_to` must be a multiple of `tensor_model_parallel_size`, and at least the vocabulary",
        "raise it, or leave it out",
        _padding_fits,
    ),
    Rule(
        "hidden_multiple_of_heads",
        _HEAD_SHAPE,
        "`hidden_size` must be a multiple of `num_attention_heads` unless `kv_channels` gives the head width",
        "change one of the two or set `--kv-channels`",
        lambda c: (
            c.config.model.kv_channels is not None
            or c.config.model.multi_latent_attention
            or c.config.model.hidden_size % c.config.model.num_attention_heads == 0
        ),
    ),
    Rule(
        "query_groups_divide_heads",
        (_MODEL.num_query_groups, _MODEL.num_attention_heads),
        "`num_query_groups` must divide `num_attention_heads`",
        "choose a divisor of the number of heads",
        lambda c: c.config.model.num_attention_heads % c.config.model.kv_heads == 0,
    ),
    Rule(
        "rotary_dim_even",
        (*(_MODEL.position_embedding_type, _MODEL.rotary_percent, _MODEL.qk_pos_emb_head_dim), *_HEAD_SHAPE),
        "the rotated part of a head must have an even number of channels, at least 2",
        "change the head width, `--rotary-percent`, or `--qk-pos-emb-head-dim` of latent attention",
        _rotary_dim_is_even,
        lambda c: f"{c.config.model.rotary_dim} of each head are rotated",
    ),
    Rule(
        "one_rotary_scaling",
        (
            *(_MODEL.use_rope_scaling, _MODEL.rotary_seq_len_interpolation_factor),
            *(_MODEL.rope_type, _MODEL.multi_latent_attention),
        ),
        "rotary positions must be scaled in one way",
        "leave out `--use-rope-scaling` or `--rotary-seq-len-interpolation-factor`; beside either, latent "
        "attention needs `--rope-type rope`",
        lambda c: _scalings(c) <= 1,
    ),
    Rule(
        "rotary_limits_in_order",
        (
            *(_MODEL.rope_low_freq_factor, _MODEL.rope_high_freq_factor),
            *(_MODEL.yarn_beta_slow, _MODEL.yarn_beta_fast),
        ),
        "the limit of the slow channels must be below that of the fast ones",
        "give `--rope-high-freq-factor` above `--rope-low-freq-factor`, `--yarn-beta-fast` above "
        "`--yarn-beta-slow`",
        lambda c: (
            c.config.model.rope_low_freq_factor < c.config.model.rope_high_freq_factor
            and c.config.model.yarn_beta_slow < c.config.model.yarn_beta_fast
        ),
    ),
    Rule(
        "positions_cover_sequence",
        (_MODEL.max_position_embeddings, _MODEL.seq_length),
        "`max_position_embeddings` must be at least `seq_length`",
        "raise it or leave it out",
        lambda c: c.config.model.positions >= c.config.model.seq_length,
    ),
    Rule(
        "scaling_reaches_extended_context",
        (_CHECKPOINT.extend_context, _MODEL.seq_length, _MODEL.position_embedding_type),
        "with `extend_context`, the scaling factor times the length of the first training must be at least "
        "`seq_length`",
        "raise `--rotary-scaling-factor` (YaRN) or `--rope-scaling-factor` (Llama 3)",
        lambda c: not c.config.checkpoint.extend_context or _scaling_reaches(c),
        lambda c: f"it is {c.config.model.scaled_to:,.0f}",
    ),
)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, min(number, _LARGEST_AXIS) + 1) if number % size == 0]


def _over_ranks(heads: int, case: Case) -> bool:
    ranks = case.config.parallel.tensor_model_parallel_size
    return heads % ranks == 0 or not case.config.model.layers_of("*")


def _fitting_layouts(case: Case) -> str:
    """The tensor x pipeline x data parallel layouts that these ranks and this model allow, nearest first."""
    model, parallel = case.config.model, case.config.parallel
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


PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(
        "world_size_factors",
        (
            _PARALLEL.tensor_model_parallel_size,
            _PARALLEL.pipeline_model_parallel_size,
            _PARALLEL.context_parallel_size,
        ),
        "the world size must be a multiple of tensor x pipeline x context parallel size",
        "start another number of ranks (torchrun --nproc-per-node; with --check-config set WORLD_SIZE), "
        "or change the layout",
        lambda c: c.world_size is None or c.data_parallel is not None,
        _fitting_layouts,
    ),
    Rule(
        "heads_over_tensor_ranks",
        (_MODEL.num_attention_heads, _PARALLEL.tensor_model_parallel_size),
        "`num_attention_heads` must be a multiple of `tensor_model_parallel_size`",
        "change one of the two",
        lambda c: _over_ranks(c.config.model.num_attention_heads, c),
    ),
    Rule(
        "query_groups_over_tensor_ranks",
        (_MODEL.num_query_groups, _PARALLEL.tensor_model_parallel_size),
        "`num_query_groups` must be a multiple of `tensor_model_parallel_size`",
        "use more query groups or fewer tensor-parallel ranks",
        lambda c: _over_ranks(c.config.model.num_query_groups or 0, c),
    ),
    Rule(
        "ffn_over_tensor_ranks",
        (_MODEL.ffn_hidden_size, _MODEL.hidden_size, _MODEL.activation, _PARALLEL.tensor_model_parallel_size),
        "the MLP's inner width must be a multiple of `tensor_model_parallel_size`",
        "set `--ffn-hidden-size` to a multiple",
        lambda c: c.config.model.ffn_size % c.config.parallel.tensor_model_parallel_size == 0,
        lambda c: f"the inner width is {c.config.model.ffn_size}",
    ),
)


def _batch_unit(case: Case) -> int:
    """Samples of one micro-batch on every replica; of one replica while their number is unknown."""
    return case.config.batch.micro_batch_size * (case.data_parallel or 1)


def _ramp_multiples(case: Case) -> bool:
    ramp = case.config.batch.rampup_batch_size
    return ramp is None or (ramp[0] % _batch_unit(case) == 0 and ramp[1] % _batch_unit(case) == 0)


def _increments(case: Case) -> int:
    batch = case.config.batch
    if batch.rampup_batch_size is None or batch.global_batch_size is None:
        return 0
    return BatchRamp(*batch.rampup_batch_size, batch.global_batch_size).increments


def _ramp_whole_increments(case: Case) -> bool:
    batch = case.config.batch
    if batch.rampup_batch_size is None or batch.global_batch_size is None:
        return True
    start, increment, _ = batch.rampup_batch_size
    return start > batch.global_batch_size or (batch.global_batch_size - start) % increment == 0


def _samples_fill_a_batch(case: Case) -> bool:
    steps = case.steps
    if case.config.training.train_samples is None or steps is None:
        return True
    return Limits.of(case.config.training).end(steps).iteration >= 1


def _unit_clause(case: Case) -> str:
    replicas = case.data_parallel
    known = f"{replicas} data-parallel ranks" if replicas else "the number of ranks is not considered"
    return f"{known}: a multiple of {_batch_unit(case)} is needed"


_RAMP = (_BATCH.rampup_batch_size, _BATCH.global_batch_size)
_STAIRS = (_BATCH.step_batch_size_schedule,)


def _stairs(case: Case) -> BatchStairs | None:
    stairs = case.config.batch.step_batch_size_schedule
    return BatchStairs.of(stairs, case.config.model.seq_length) if stairs else None


BATCH_RULES: tuple[Rule, ...] = (
    Rule(
        "global_batch_multiple",
        (_BATCH.global_batch_size, _BATCH.micro_batch_size),
        "`global_batch_size` must be a multiple of `micro_batch_size` x data-parallel size",
        "change one of the batch sizes or the number of ranks",
        lambda c: (c.config.batch.global_batch_size or _batch_unit(c)) % _batch_unit(c) == 0,
        _unit_clause,
    ),
    Rule(
        "ramp_starts_below_global_batch",
        _RAMP,
        "`rampup_batch_size` must start at no more than `global_batch_size`",
        "start lower",
        lambda c: (
            c.config.batch.rampup_batch_size is None
            or c.config.batch.global_batch_size is None
            or c.config.batch.rampup_batch_size[0] <= c.config.batch.global_batch_size
        ),
    ),
    Rule(
        "ramp_whole_increments",
        _RAMP,
        "`rampup_batch_size` must reach `global_batch_size` in whole increments",
        "choose an increment that divides the distance from its start to the global batch",
        _ramp_whole_increments,
    ),
    Rule(
        "ramp_increments",
        _RAMP,
        f"`rampup_batch_size` must reach `global_batch_size` in at most {MOST_INCREMENTS:,} increments",
        "choose a larger increment",
        lambda c: _increments(c) <= MOST_INCREMENTS,
        lambda c: f"that takes {_increments(c):,}",
    ),
    Rule(
        "ramp_multiples",
        (_BATCH.rampup_batch_size, _BATCH.micro_batch_size),
        "start and increment of `rampup_batch_size` must be multiples of `micro_batch_size` x data-parallel "
        "size",
        "choose such multiples",
        _ramp_multiples,
        _unit_clause,
    ),
    Rule(
        "batch_steps_begin_and_rise",
        (*_STAIRS, _MODEL.seq_length),
        "`step_batch_size_schedule` must begin at 0, and each next threshold be at least one sample later",
        "correct it",
        lambda c: (stairs := _stairs(c)) is None or stairs.rise,
    ),
    Rule(
        "batch_steps_end_at_global_batch",
        (*_STAIRS, _BATCH.global_batch_size),
        "`global_batch_size` must be the last size of `step_batch_size_schedule`",
        "leave `--global-batch-size` out",
        lambda c: (
            not c.config.batch.step_batch_size_schedule
            or c.config.batch.global_batch_size in (None, c.config.batch.final_batch_size)
        ),
    ),
    Rule(
        "batch_steps_multiples",
        (*_STAIRS, _BATCH.micro_batch_size),
        "each size of `step_batch_size_schedule` must be a multiple of `micro_batch_size` x data-parallel "
        "size",
        "choose such multiples",
        lambda c: (stairs := _stairs(c)) is None or not any(size % _batch_unit(c) for size in stairs.sizes),
        _unit_clause,
    ),
    Rule(
        "samples_fill_a_batch",
        (_TRAINING.train_samples, _BATCH.micro_batch_size, *_RAMP),
        "`train_samples` must suffice for one global batch",
        "train on more samples or lower the batch size",
        _samples_fill_a_batch,
    ),
)
