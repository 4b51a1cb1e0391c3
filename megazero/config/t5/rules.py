"""Rules about T5: its two stacks, and what is not offered with them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from megazero.config.derive import sequence_multiple
from megazero.config.rules.rule import Case, Rule, display_name, value_at
from megazero.config.tree.optimizer import ELEMENTWISE_NAMES

_LAYERS = ("model.num_layers", "model.t5_encoder_layers", "model.t5_decoder_layers")
_LENGTHS = ("model.seq_length", "model.t5_decoder_seq_length")

# Settings of other models and methods, and the values that say nothing.
_ALONE: MappingProxyType[str, tuple[Any, ...]] = MappingProxyType(
    {
        "model.position_embedding_type": ("learned_absolute", "relative", "none"),
        "model.apply_residual_connection_post_layernorm": (False,),
        "model.num_experts": ((),),
        "model.window_size": (None,),
        "model.sparse_attention": ("dense",),
        "model.softmax_type": ("vanilla",),
        "model.softmax_scale": (None,),
        "model.attn_logit_softcapping": (None,),
        "model.qk_layernorm": (False,),
        "model.attention_output_gate": (False,),
        "model.norm_position": ("input",),
        "model.residual_multiplier": (1.0,),
        "model.use_parallel_residual": (False,),
        "recompute.modules": (("core_attn",),),
        "finetune.task": (None,),
        "parallel.context_parallel_size": (1,),
        "curriculum.seqlen_schedule": ("none",),
        "skipping.random_ltd": (False,),
        "skipping.progressive_layer_drop": (False,),
        "acceleration.compile": (False,),
        "profiling.flops_profiler": (False,),
        "acceleration.cuda_graph": (False,),
        "precision.fp8_format": ("none",),
        "optimizer.optimizer": (*ELEMENTWISE_NAMES, "lamb", "muon"),
    }
)


def _others(case: Case) -> str:
    """The settings that are given, and may not be beside a T5."""
    given = {path: value_at(case.config, path) for path in _ALONE if case.config.model.family == "t5"}
    return ", ".join(f"`{display_name(path)}` is {v}" for path, v in given.items() if v not in _ALONE[path])


def _stacks_add_up(case: Case) -> bool:
    model = case.config.model
    both = model.encoder_layers + (model.t5_decoder_layers or 0)
    return model.family != "t5" or model.encoder_layers < model.num_layers == both


def _kinds_of_distance(case: Case) -> bool:
    model = case.config.model
    return model.position_embedding_type != "relative" or model.tells_distances


def _decoder_fits(case: Case) -> bool:
    model, multiple = case.config.model, sequence_multiple(case.config.parallel)
    length = model.decoder_length
    return model.family != "t5" or (length <= model.seq_length and length % multiple == 0)


ENCODER_DECODER_RULES: tuple[Rule, ...] = (
    Rule(
        "t5_alone",
        ("model.family", *_ALONE),
        "a T5 must be trained without the settings of other models and methods",
        "leave them out",
        lambda c: not _others(c),
        _others,
        in_detail=True,
    ),
    Rule(
        "stacks_add_up",
        ("model.family", *_LAYERS),
        "`num_layers` must be the layers of a T5's encoder and decoder together",
        "give `--encoder-num-layers` and `--decoder-num-layers`, or `--num-layers` for the layers of each",
        _stacks_add_up,
    ),
    Rule(
        "decoder_fits",
        ("model.family", *_LENGTHS, "parallel.tensor_model_parallel_size", "parallel.sequence_parallel"),
        "`t5_decoder_seq_length` must be at most `seq_length`, and divide over the ranks that share a "
        "sequence",
        "raise `--encoder-seq-length` (shorter texts take no more time, as padding is left out), or change "
        "the decoder's",
        _decoder_fits,
    ),
    Rule(
        "relative_kinds",
        ("model.position_embedding_type", "model.t5_relative_buckets", "model.t5_relative_distance"),
        "`t5_relative_buckets` must be at least 4, two for keys on either side, and `t5_relative_distance` "
        "more than half of that, which are single distances",
        "raise `--relative-attention-num-buckets` or `--relative-attention-max-distance`",
        _kinds_of_distance,
    ),
)
