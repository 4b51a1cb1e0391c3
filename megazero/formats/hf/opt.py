"""OPT (Zhang et al. 2022) as transformers' OPTForCausalLM: GPT-2 with ReLU, in plain linear layers.

Positions begin at row 2 of its table, a leftover of fairseq, which counted from the padding id. The two rows
before are dropped when it is read, and written as zeros.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import TensorRule, untied
from megazero.formats.hf.architecture import (
    DENSE_LIMITS,
    GELUS,
    TIED,
    Architecture,
    FieldPair,
    Json,
    JsonObject,
    pair,
    separate,
)
from megazero.formats.hf.llama import BIASES_ALIKE
from megazero.formats.hf.windows import PLAIN_ATTENTION

_MODEL = "model.decoder"
_LAYER = f"{_MODEL}.layers.{{i}}"
_WORDS, _HEAD = f"{_MODEL}.embed_tokens.weight", "lm_head.weight"
_POSITIONS = f"{_MODEL}.embed_positions.weight"
_BEFORE, _OURS = f"{_POSITIONS}, before the first", f"{_POSITIONS}, from the first"
_NARROW = "word_embed_proj_dim"


def _plain(config: Json) -> JsonObject:
    """Drop the embedding's width, which must be the layers' (only OPT-350m projects narrower embeddings)."""
    out = dict(config)
    width, hidden = out.pop(_NARROW, None), out.get("hidden_size", 768)
    if width not in (None, hidden):
        raise ValueError(
            f"`{_NARROW}` must be the hidden size, {hidden!r:.40}, but is {width!r:.40}; embeddings that are "
            "projected are not supported"
        )
    return out


OPT = Architecture(
    name="OPTForCausalLM",
    model_type="opt",
    auto="AutoModelForCausalLM",
    prefix="model.",
    rules=(
        TensorRule("embedding.word.weight", "v h", _WORDS, "v h"),
        TensorRule("embedding.position.weight", "p h", _OURS, "p h"),
        *pair("layers.{i}.input_norm", f"{_LAYER}.self_attn_layer_norm"),
        *separate(f"{_LAYER}.self_attn", "q_proj", "k_proj", "v_proj"),
        *pair("layers.{i}.attention.out", f"{_LAYER}.self_attn.out_proj", "h a"),
        *pair("layers.{i}.mlp_norm", f"{_LAYER}.final_layer_norm"),
        *pair("layers.{i}.mlp.up", f"{_LAYER}.fc1", "f h"),
        *pair("layers.{i}.mlp.down", f"{_LAYER}.fc2", "h f"),
        *pair("final_norm", f"{_MODEL}.final_layer_norm"),
        TensorRule("head.weight", "v h", _HEAD, "v h", when=untied),
    ),
    copies=((_HEAD, _WORDS),),
    ignored=(),
    fused=((_POSITIONS, (_BEFORE, _OURS)),),
    blank=(TensorRule("embedding.position.before", "2 h", _BEFORE, "2 h"),),
    settings=(
        FieldPair("num_hidden_layers", "num_layers", 12),
        FieldPair("hidden_size", "hidden_size", 768),
        FieldPair("num_attention_heads", "num_attention_heads", 12),
        FieldPair("ffn_dim", "ffn_hidden_size", 3072, resolved="ffn_size"),
        FieldPair("max_position_embeddings", "max_position_embeddings", 2048, resolved="positions"),
        FieldPair("activation_function", "activation", "relu", words=(("relu", "relu"), *GELUS)),
        FieldPair("enable_bias", "add_bias_linear", True),
        FieldPair("dropout", "hidden_dropout", 0.1),
        FieldPair("attention_dropout", "attention_dropout", 0.0),
        FieldPair("init_std", "init_method_std", 0.02),
        replace(TIED, default=True),
    ),
    fixed=(
        ("do_layer_norm_before", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ),
    ours_fixed=(
        ("family", "gpt"),
        ("position_embedding_type", "learned_absolute"),
        ("normalization", "LayerNorm"),
        ("norm_epsilon", 1e-5),
        ("apply_residual_connection_post_layernorm", False),
    ),
    limits=(*DENSE_LIMITS, *PLAIN_ATTENTION, BIASES_ALIKE),
    plain=_plain,
)
