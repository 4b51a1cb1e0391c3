"""Llama (Touvron et al. 2023) as transformers' LlamaForCausalLM, with grouped-query attention.

transformers, like megazero, rotates the first half of a head's channels against the second, so queries and
keys need no permutation; only Meta's original files pair neighbouring channels.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import TensorRule, biased, untied
from megazero.formats.hf.architecture import (
    DENSE_LIMITS,
    TIED,
    Architecture,
    FieldPair,
    Limit,
    pair,
    separate,
)
from megazero.formats.hf.rope import ROPE_SETTINGS, plain_rope, with_rope_parameters
from megazero.formats.hf.windows import NO_WINDOWS

_WORDS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
LAYER = "model.layers.{i}"
GATE, UP = ("2", slice(0, 1)), ("2", slice(1, 2))

_EMBEDDING = (TensorRule("embedding.word.weight", "v h", _WORDS, "v h"),)
_ATTENTION = (
    *separate(f"{LAYER}.self_attn", "q_proj", "k_proj", "v_proj"),
    *pair("layers.{i}.attention.out", f"{LAYER}.self_attn.o_proj", "h a"),
)
HEAD_NORMS = tuple(
    TensorRule(f"layers.{{i}}.attention.{name}.weight", "d", f"{LAYER}.self_attn.{name}.weight", "d")
    for name in ("q_norm", "k_norm")
)
"""Rules for norms of each head's queries and keys [head_dim], with weights that all heads share."""
PROJECTION_NORMS = tuple(
    TensorRule(f"layers.{{i}}.attention.{name}.weight", dim, f"{LAYER}.self_attn.{name}.weight", dim)
    for name, dim in (("q_norm", "a"), ("k_norm", "k"))
)
"""Rules for norms over the channels of all heads' queries, and of all heads' keys."""
MLP = (
    *(
        rule
        for name, take in (("gate_proj", GATE), ("up_proj", UP))
        for rule in (
            TensorRule("layers.{i}.mlp.up.weight", "2 f h", f"{LAYER}.mlp.{name}.weight", "(2 f) h", take),
            TensorRule("layers.{i}.mlp.up.bias", "2 f", f"{LAYER}.mlp.{name}.bias", "(2 f)", take, biased),
        )
    ),
    *pair("layers.{i}.mlp.down", f"{LAYER}.mlp.down_proj", "h f"),
)
_END = (
    TensorRule("final_norm.weight", "h", "model.norm.weight", "h"),
    TensorRule("head.weight", "v h", _HEAD, "v h", when=untied),
)


def layer_norms(**theirs: str) -> tuple[TensorRule, ...]:
    """Rules for a layer's norms, given as ours=theirs."""
    return tuple(
        TensorRule(f"layers.{{i}}.{ours}.weight", "h", f"{LAYER}.{name}.weight", "h")
        for ours, name in theirs.items()
    )


_INPUT_NORMS = layer_norms(input_norm="input_layernorm", mlp_norm="post_attention_layernorm")


def rules_with(
    mlp: tuple[TensorRule, ...] = MLP,
    norms: tuple[TensorRule, ...] = _INPUT_NORMS,
    attention: tuple[TensorRule, ...] = _ATTENTION,
) -> tuple[TensorRule, ...]:
    """Rules for a model like Llama with other MLPs, norms or attention."""
    return (*_EMBEDDING, *norms, *attention, *mlp, *_END)


def with_defaults(settings: tuple[FieldPair, ...], **defaults: object) -> tuple[FieldPair, ...]:
    """Settings with other defaults, given by the names in ``config.json``."""
    return tuple(
        replace(setting, default=defaults.get(setting.theirs, setting.default)) for setting in settings
    )


def without(settings: tuple[FieldPair, ...], *theirs: str) -> tuple[FieldPair, ...]:
    """Settings without some, given by the names in ``config.json``."""
    return tuple(setting for setting in settings if setting.theirs not in theirs)


EVEN_HEADS = Limit(lambda m: m.head_dim % 2 == 0, "the width of a head must be even to be rotated")
BIASES_ALIKE = Limit(
    lambda m: m.qkv_bias == m.add_bias_linear,
    "queries, keys and values must have biases where all linear layers have them, and only there",
)

LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    auto="AutoModelForCausalLM",
    prefix="model.",
    rules=rules_with(),
    copies=((_HEAD, _WORDS),),
    ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",),
    settings=(
        FieldPair("num_hidden_layers", "num_layers", 32),
        FieldPair("hidden_size", "hidden_size", 4096),
        FieldPair("num_attention_heads", "num_attention_heads", 32),
        FieldPair("num_key_value_heads", "num_query_groups", None, int, resolved="kv_heads"),
        FieldPair("head_dim", "kv_channels", None, int, resolved="head_dim"),
        FieldPair("intermediate_size", "ffn_hidden_size", 11008, resolved="ffn_size"),
        FieldPair("max_position_embeddings", "max_position_embeddings", 2048, resolved="positions"),
        FieldPair("hidden_act", "activation", "silu", words=(("silu", "swiglu"), ("swish", "swiglu"))),
        FieldPair("attention_bias", "add_bias_linear", False),
        FieldPair("mlp_bias", "add_bias_linear", False),
        FieldPair("rms_norm_eps", "norm_epsilon", 1e-6),
        *ROPE_SETTINGS,
        FieldPair("attention_dropout", "attention_dropout", 0.0),
        FieldPair("initializer_range", "init_method_std", 0.02),
        TIED,
    ),
    ours_fixed=(
        ("family", "gpt"),
        ("rotary_percent", 1.0),
        ("normalization", "RMSNorm"),
        ("apply_residual_connection_post_layernorm", False),
    ),
    implied=(("hidden_dropout", 0.0),),
    limits=(
        *DENSE_LIMITS,
        NO_WINDOWS,
        EVEN_HEADS,
        BIASES_ALIKE,
    ),
    plain=plain_rope,
    complete=with_rope_parameters,
)

UNBIASED_SETTINGS = tuple(setting for setting in LLAMA.settings if setting.ours != "add_bias_linear")
"""The settings for descendants whose ``config.json`` has no fields for biases."""
