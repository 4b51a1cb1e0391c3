"""GPT-2 (Radford et al. 2019) as transformers' GPT2LMHeadModel.

Its linear layers are `Conv1D`, whose weight is [in, out], the transpose of `nn.Linear`'s. `c_attn` makes all
queries, then all keys, then all values, while megazero has the three head by head, so that ranks can split
heads.
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
    pair,
)
from megazero.formats.hf.windows import PLAIN_ATTENTION

_WORDS = "transformer.wte.weight"
_HEAD = "lm_head.weight"

RULES = (
    TensorRule("embedding.word.weight", "v h", _WORDS, "v h"),
    TensorRule("embedding.position.weight", "p h", "transformer.wpe.weight", "p h"),
    *pair("layers.{i}.input_norm", "transformer.h.{i}.ln_1"),
    TensorRule(
        "layers.{i}.attention.qkv.weight", "g s d h", "transformer.h.{i}.attn.c_attn.weight", "h (s g d)"
    ),
    TensorRule("layers.{i}.attention.qkv.bias", "g s d", "transformer.h.{i}.attn.c_attn.bias", "(s g d)"),
    TensorRule("layers.{i}.attention.out.weight", "h a", "transformer.h.{i}.attn.c_proj.weight", "a h"),
    TensorRule("layers.{i}.attention.out.bias", "h", "transformer.h.{i}.attn.c_proj.bias", "h"),
    *pair("layers.{i}.mlp_norm", "transformer.h.{i}.ln_2"),
    TensorRule("layers.{i}.mlp.up.weight", "f h", "transformer.h.{i}.mlp.c_fc.weight", "h f"),
    TensorRule("layers.{i}.mlp.up.bias", "f", "transformer.h.{i}.mlp.c_fc.bias", "f"),
    TensorRule("layers.{i}.mlp.down.weight", "h f", "transformer.h.{i}.mlp.c_proj.weight", "f h"),
    TensorRule("layers.{i}.mlp.down.bias", "h", "transformer.h.{i}.mlp.c_proj.bias", "h"),
    *pair("final_norm", "transformer.ln_f"),
    TensorRule("head.weight", "v h", _HEAD, "v h", when=untied),
)

GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    auto="AutoModelForCausalLM",
    prefix="transformer.",
    rules=RULES,
    copies=((_HEAD, _WORDS),),
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    settings=(
        FieldPair("n_layer", "num_layers", 12),
        FieldPair("n_embd", "hidden_size", 768),
        FieldPair("n_head", "num_attention_heads", 12),
        FieldPair("n_positions", "max_position_embeddings", 1024, resolved="positions"),
        FieldPair("n_inner", "ffn_hidden_size", None, int, resolved="ffn_size"),
        FieldPair("activation_function", "activation", "gelu_new", words=GELUS),
        FieldPair("layer_norm_epsilon", "norm_epsilon", 1e-5),
        FieldPair("resid_pdrop", "hidden_dropout", 0.1),
        FieldPair("embd_pdrop", "hidden_dropout", 0.1),
        FieldPair("attn_pdrop", "attention_dropout", 0.1),
        FieldPair("initializer_range", "init_method_std", 0.02),
        replace(TIED, default=True),
    ),
    fixed=(
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("reorder_and_upcast_attn", False),
    ),
    ours_fixed=(
        ("family", "gpt"),
        ("position_embedding_type", "learned_absolute"),
        ("normalization", "LayerNorm"),
        ("add_bias_linear", True),
        ("apply_residual_connection_post_layernorm", False),
    ),
    limits=(*DENSE_LIMITS, *PLAIN_ATTENTION),
)
