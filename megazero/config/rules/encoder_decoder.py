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
        "finetune.task": (None,),
        "parallel.context_parallel_size": (1,),
        "curriculum.seqlen_schedule": ("none",),
        "skipping.random_ltd": (False,),
        "skipping.progressive_layer_drop": (False,),
        "acceleration.compile": (False,),
        "acceleration.cuda_graph": (False,),
        "precision.fp8_format": ("none",),
        "optimizer.optimizer": (*ELEMENTWISE_NAMES, "lamb", "muon"),
    }
)


def _others(case: Case) -> list[str]:
    """The settings that are given, and may not be beside a T5."""
    config = case.config
    if config.model.family != "t5":
        return []
    return [
        f"`{display_name(path)}` is {value_at(config, path)}"
        for path, allowed in _ALONE.items()
        if value_at(config, path) not in allowed
    ]


def _stacks_add_up(case: Case) -> bool:
    model = case.config.model
    if model.family != "t5":
        return True
    return model.num_layers == model.encoder_layers + (model.t5_decoder_layers or 0) and bool(
        model.t5_decoder_layers
    )


ENCODER_DECODER_RULES: tuple[Rule, ...] = (
    Rule(
        "t5_alone",
        ("model.family", *_ALONE),
        "a T5 must be trained without the settings of other models and methods",
        "leave them out",
        lambda c: not _others(c),
        lambda c: ", ".join(_others(c)),
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
        "decoder_within_encoder",
        ("model.family", *_LENGTHS),
        "`t5_decoder_seq_length` must be at most `seq_length`",
        "raise `--encoder-seq-length`: shorter texts take no more time, as padding is left out",
        lambda c: c.config.model.family != "t5" or c.config.model.decoder_length <= c.config.model.seq_length,
    ),
    Rule(
        "decoder_over_ranks",
        ("model.family", *_LENGTHS, "parallel.tensor_model_parallel_size", "parallel.sequence_parallel"),
        "`t5_decoder_seq_length` must divide evenly over the ranks that share a sequence",
        "change the length or leave out `--sequence-parallel`",
        lambda c: (
            c.config.model.family != "t5"
            or c.config.model.decoder_length % sequence_multiple(c.config.parallel) == 0
        ),
    ),
)
