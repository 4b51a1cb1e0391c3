"""Mamba-2 (Dao & Gu 2024) as transformers' Mamba2ForCausalLM: every layer is a state-space mixer."""

from __future__ import annotations

from megazero.checkpoint.naming import TensorRule, untied
from megazero.formats.hf.architecture import (
    TIED,
    Architecture,
    FieldPair,
    Json,
    JsonObject,
    Limit,
    layers_of,
    pair,
)
from megazero.formats.hf.state_space import (
    EXPANDED_LIMITS,
    LEAST_STEP,
    LETTERS,
    OURS_FIXED,
    PATTERN,
    complete_mixers,
    mixer,
    plain_mixers,
    shape,
)

_WORDS, _HEAD = "backbone.embeddings.weight", "lm_head.weight"
_LAYER = "backbone.layers.{i}"
_RULES, _FUSED = mixer(f"{_LAYER}.mixer")
_NAMES = ("expand", "num_heads", "head_dim")


def _plain(config: Json) -> JsonObject:
    layers = layers_of(config, 64)
    return {**plain_mixers(config, *_NAMES), "num_hidden_layers": layers, PATTERN: "M" * layers}


def _complete(config: Json) -> JsonObject:
    out = complete_mixers(config, *_NAMES)
    del out[PATTERN]
    return out


MAMBA2 = Architecture(
    name="Mamba2ForCausalLM",
    model_type="mamba2",
    auto="AutoModelForCausalLM",
    prefix="backbone.",
    rules=(
        TensorRule("embedding.word.weight", "v h", _WORDS, "v h"),
        *pair("layers.{i}.input_norm", f"{_LAYER}.norm")[:1],
        *_RULES,
        *pair("final_norm", "backbone.norm_f")[:1],
        TensorRule("head.weight", "v h", _HEAD, "v h", when=untied),
    ),
    copies=((_HEAD, _WORDS),),
    ignored=(),
    fused=_FUSED,
    renamed=((r"backbone\.embedding\.weight", _WORDS),),  # the name in the authors' own files
    settings=(
        FieldPair("num_hidden_layers", "num_layers", 64),
        FieldPair("hidden_size", "hidden_size", 4096),
        LETTERS,
        *shape(*_NAMES[1:], "state_size", "n_groups"),
        LEAST_STEP,
        FieldPair("layer_norm_epsilon", "norm_epsilon", 1e-5),
        FieldPair("residual_in_fp32", "fp32_residual_connection", True),
        # A mixer has no largest position: this is the length of training, which transformers ignores.
        FieldPair("max_position_embeddings", "max_position_embeddings", 2048, resolved="positions"),
        FieldPair("initializer_range", "init_method_std", 0.1),
        TIED,
    ),
    fixed=(("hidden_act", "silu"), ("use_bias", False), ("use_conv_bias", True), ("conv_kernel", 4)),
    ours_fixed=(*OURS_FIXED, ("position_embedding_type", "none")),
    implied=(
        ("num_attention_heads", 1),
        ("add_bias_linear", False),
        ("hidden_dropout", 0.0),
        ("attention_dropout", 0.0),
    ),
    limits=(
        *EXPANDED_LIMITS,
        Limit(lambda m: set(m.layer_kinds or "") == {"M"}, "all layers must be Mamba-2"),
    ),
    plain=_plain,
    complete=_complete,
)
