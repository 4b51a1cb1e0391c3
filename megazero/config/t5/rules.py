"""Rules about T5: its two stacks, and what is not offered with them."""

from __future__ import annotations

from megazero.config.condition import config
from megazero.config.derive import sequence_multiple
from megazero.config.fields import paths
from megazero.config.rules.rule import Case, conditions, rule, unmet
from megazero.config.tree.optimizer import ELEMENTWISE_NAMES

_MODEL, _PARALLEL = paths.model, paths.parallel

_LAYERS = (_MODEL.num_layers, _MODEL.t5_encoder_layers, _MODEL.t5_decoder_layers)
_LENGTHS = (_MODEL.seq_length, _MODEL.t5_decoder_seq_length)

# Settings of other models and methods, each with the values that turn it off.
_ALONE = conditions(
    "t5_alone",
    config.model.position_embedding_type.among("learned_absolute", "relative", "none"),
    config.model.apply_residual_connection_post_layernorm.is_off,
    config.model.num_experts == (),
    config.model.window_size.is_none,
    config.model.sparse_attention == "dense",
    config.model.softmax_type == "vanilla",
    config.model.softmax_scale.is_none,
    config.model.attn_logit_softcapping.is_none,
    config.model.qk_layernorm.is_off,
    config.model.attention_output_gate.is_off,
    config.model.norm_position == "input",
    config.model.residual_multiplier == 1.0,
    config.model.use_parallel_residual.is_off,
    config.recompute.modules == ("core_attn",),
    config.finetune.task.is_none,
    config.parallel.context_parallel_size == 1,
    config.curriculum.seqlen_schedule == "none",
    config.skipping.random_ltd.is_off,
    config.skipping.progressive_layer_drop.is_off,
    config.acceleration.compile.is_off,
    config.profiling.flops_profiler.is_off,
    config.acceleration.cuda_graph.is_off,
    config.precision.fp8_format == "none",
    config.optimizer.optimizer.among(*ELEMENTWISE_NAMES, "lamb", "muon"),
)


def _is_t5(case: Case) -> bool:
    return case.model.family == "t5"


@rule(
    (_MODEL.family, *(condition.path for condition in _ALONE)),
    "leave them out",
    where=_is_t5,
    facts=lambda c: unmet(_ALONE, c),
)
def t5_alone(case: Case) -> bool:
    """a T5 must be trained without the settings of other models and methods"""
    return not unmet(_ALONE, case)


@rule(
    (_MODEL.family, *_LAYERS),
    "give `--encoder-num-layers` and `--decoder-num-layers`, or `--num-layers` for the layers of each",
    where=_is_t5,
)
def stacks_add_up(case: Case) -> bool:
    """`num_layers` must be the layers of a T5's encoder and decoder together"""
    model = case.model
    both = model.encoder_layers + (model.t5_decoder_layers or 0)
    return model.encoder_layers < model.num_layers == both


@rule(
    (_MODEL.family, *_LENGTHS, _PARALLEL.tensor_model_parallel_size, _PARALLEL.sequence_parallel),
    "raise `--encoder-seq-length` (shorter texts take no more time, as padding is left out), or change "
    "the decoder's",
    where=_is_t5,
)
def decoder_fits(case: Case) -> bool:
    """`t5_decoder_seq_length` must be at most `seq_length`, and divide over the ranks that share a
    sequence"""
    length = case.model.decoder_length
    return length <= case.model.seq_length and length % sequence_multiple(case.parallel) == 0


@rule(
    (_MODEL.position_embedding_type, _MODEL.t5_relative_buckets, _MODEL.t5_relative_distance),
    "raise `--relative-attention-num-buckets` or `--relative-attention-max-distance`",
    where=lambda c: c.model.position_embedding_type == "relative",
)
def relative_kinds(case: Case) -> bool:
    """`t5_relative_buckets` must be at least 4, two for keys on either side, and `t5_relative_distance` more
    than half of that, which are single distances"""
    return case.model.tells_distances
