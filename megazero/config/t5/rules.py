"""Rules about T5: its two stacks, and what is not offered with them."""

from __future__ import annotations

from megazero.config.condition import config
from megazero.config.derive import sequence_multiple
from megazero.config.fields import paths
from megazero.config.rules.rule import Case, Rule, conditions, display_name, value_at
from megazero.config.tree.optimizer import ELEMENTWISE_NAMES

_MODEL, _PARALLEL = paths.model, paths.parallel

_LAYERS = (_MODEL.num_layers, _MODEL.t5_encoder_layers, _MODEL.t5_decoder_layers)
_LENGTHS = (_MODEL.seq_length, _MODEL.t5_decoder_seq_length)

# Settings of other models and methods, each with the values that say nothing.
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


def _others(case: Case) -> str:
    """The settings that are given, and may not be beside a T5."""
    given = [(c, value_at(case.config, c.path)) for c in _ALONE if case.config.model.family == "t5"]
    return ", ".join(f"`{display_name(c.path)}` is {value}" for c, value in given if not c.holds(value))


def _stacks_add_up(case: Case) -> bool:
    model = case.config.model
    both = model.encoder_layers + (model.t5_decoder_layers or 0)
    return model.family != "t5" or model.encoder_layers < model.num_layers == both


def _decoder_fits(case: Case) -> bool:
    model, multiple = case.config.model, sequence_multiple(case.config.parallel)
    length = model.decoder_length
    return model.family != "t5" or (length <= model.seq_length and length % multiple == 0)


ENCODER_DECODER_RULES: tuple[Rule, ...] = (
    Rule(
        "t5_alone",
        (_MODEL.family, *(condition.path for condition in _ALONE)),
        "a T5 must be trained without the settings of other models and methods",
        "leave them out",
        lambda c: not _others(c),
        _others,
        in_detail=True,
    ),
    Rule(
        "stacks_add_up",
        (_MODEL.family, *_LAYERS),
        "`num_layers` must be the layers of a T5's encoder and decoder together",
        "give `--encoder-num-layers` and `--decoder-num-layers`, or `--num-layers` for the layers of each",
        _stacks_add_up,
    ),
    Rule(
        "decoder_fits",
        (_MODEL.family, *_LENGTHS, _PARALLEL.tensor_model_parallel_size, _PARALLEL.sequence_parallel),
        "`t5_decoder_seq_length` must be at most `seq_length`, and divide over the ranks that share a "
        "sequence",
        "raise `--encoder-seq-length` (shorter texts take no more time, as padding is left out), or change "
        "the decoder's",
        _decoder_fits,
    ),
    Rule(
        "relative_kinds",
        (_MODEL.position_embedding_type, _MODEL.t5_relative_buckets, _MODEL.t5_relative_distance),
        "`t5_relative_buckets` must be at least 4, two for keys on either side, and `t5_relative_distance` "
        "more than half of that, which are single distances",
        "raise `--relative-attention-num-buckets` or `--relative-attention-max-distance`",
        lambda c: c.config.model.position_embedding_type != "relative" or c.config.model.tells_distances,
    ),
)
