"""BLOOM (BigScience 2022) as transformers' BloomForCausalLM: ALiBi, and a norm of the embedding.

Its fused queries, keys and values lie head by head, as Megatron-LM's and megazero's do.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import TensorRule, untied
from megazero.formats.hf.architecture import (
    DENSE_LIMITS,
    PLAIN_EMBEDDING,
    TIED,
    Architecture,
    FieldPair,
    Limit,
    pair,
)
from megazero.formats.hf.windows import PLAIN_ATTENTION

_WORDS, _HEAD = "transformer.word_embeddings.weight", "lm_head.weight"
_LAYER = "transformer.h.{i}"

BLOOM = Architecture(
    name="BloomForCausalLM",
    model_type="bloom",
    auto="AutoModelForCausalLM",
    prefix="transformer.",
    rules=(
        TensorRule("embedding.word.weight", "v h", _WORDS, "v h"),
        *pair("embedding.norm", "transformer.word_embeddings_layernorm"),
        *pair("layers.{i}.input_norm", f"{_LAYER}.input_layernorm"),
        *pair("layers.{i}.attention.qkv", f"{_LAYER}.self_attention.query_key_value", "g s d h", "(g s d) h"),
        *pair("layers.{i}.attention.out", f"{_LAYER}.self_attention.dense", "h a"),
        *pair("layers.{i}.mlp_norm", f"{_LAYER}.post_attention_layernorm"),
        *pair("layers.{i}.mlp.up", f"{_LAYER}.mlp.dense_h_to_4h", "f h"),
        *pair("layers.{i}.mlp.down", f"{_LAYER}.mlp.dense_4h_to_h", "h f"),
        *pair("final_norm", "transformer.ln_f"),
        TensorRule("head.weight", "v h", _HEAD, "v h", when=untied),
    ),
    copies=((_HEAD, _WORDS),),
    ignored=(),
    settings=(
        FieldPair("n_layer", "num_layers", 2),
        FieldPair("hidden_size", "hidden_size", 64),
        FieldPair("n_head", "num_attention_heads", 8),
        # ALiBi has no largest position: this is the length of training, which transformers ignores.
        FieldPair("seq_length", "max_position_embeddings", 2048, resolved="positions"),
        FieldPair("layer_norm_epsilon", "norm_epsilon", 1e-5),
        FieldPair(
            "apply_residual_connection_post_layernorm", "apply_residual_connection_post_layernorm", False
        ),
        FieldPair("hidden_dropout", "hidden_dropout", 0.0),
        FieldPair("attention_dropout", "attention_dropout", 0.0),
        FieldPair("initializer_range", "init_method_std", 0.02),
        replace(TIED, default=True),
    ),
    ours_fixed=(
        ("family", "gpt"),
        ("position_embedding_type", "alibi"),
        ("embed_layernorm", True),
        ("normalization", "LayerNorm"),
        ("activation", "gelu"),
        ("add_bias_linear", True),
    ),
    limits=(
        *(limit for limit in DENSE_LIMITS if limit is not PLAIN_EMBEDDING),
        *PLAIN_ATTENTION,
        Limit(lambda m: m.ffn_size == 4 * m.hidden_size, "the MLP must be four times as wide as the model"),
    ),
)
