"""Gemma 2 and the text model of Gemma 3 (Gemma Team 2024, 2025) as transformers' classes for causal LM.

Norms are on both sides of attention and MLP and store weight - 1. Embeddings are multiplied by the square
root of their width, and most layers have a sliding window. Gemma 2 caps attention scores and logits; Gemma 3
normalizes queries and keys, and has a larger rope base in layers without a window.
"""

from __future__ import annotations

import math
from dataclasses import replace

from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.architecture import DENSE_LIMITS, FieldPair, Json, JsonObject, Limit
from megazero.formats.hf.llama import (
    EVEN_HEADS,
    HEAD_NORMS,
    LLAMA,
    MLP,
    UNBIASED_SETTINGS,
    layer_norms,
    rules_with,
    with_defaults,
    without,
)
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import PATTERN, WINDOW, WINDOWED_LAYERS, plain_listed, with_listed

_ROOT, _BOTH_WAYS = "root of hidden_size", "use_bidirectional_attention"
_SCORES, _LOGITS = "attn_logit_softcapping", "final_logit_softcapping"
_LOCAL, _PARAMETERS = "rope_local_base_freq", "rope_parameters"
_LAYERS, _WIDTH = 26, 2304


def _plain(config: Json, interval: object) -> JsonObject:
    """Flatten the fields that Gemma 2 and 3 have in common."""
    out = plain_rope(plain_listed(config, _LAYERS, 4096, interval))
    if out.get(_BOTH_WAYS) is None:
        out.pop(_BOTH_WAYS, None)
    size = out.get("hidden_size", _WIDTH)
    return {**out, _ROOT: math.sqrt(size) if type(size) is int and size > 0 else 1.0}


def _plain_gemma3(config: Json) -> JsonObject:
    """Flatten both rotations: version 5 nests one for each kind of layer, version 4 has two fields."""
    out = dict(config)
    interval, local = out.pop(PATTERN, 6), out.pop(_LOCAL, None)
    rotations = out.pop(_PARAMETERS, None)
    if isinstance(rotations, dict):
        windowed, others = (rotations.get(f"{kind}_attention") or {} for kind in ("sliding", "full"))
        if not isinstance(windowed, dict):
            raise ValueError(f"`{_PARAMETERS}` must hold objects, but is {rotations!r:.200}")
        if windowed.get("rope_type", "default") != "default":
            raise ValueError(
                f"`{_PARAMETERS}` must not scale layers with a window, but is {rotations!r:.200}"
            )
        local = windowed.get("rope_theta", local)
        out[_PARAMETERS] = others
    out = {"rope_theta": 1e6, **_plain(out, interval)}
    has_windows = out.get(WINDOWED_LAYERS.theirs) is not None
    return {**out, _LOCAL: (10000.0 if local is None else local) if has_windows else None}


def _without_root(config: Json) -> JsonObject:
    out = LLAMA.complete(config)
    del out[_ROOT]
    return out


def _with_rotations(config: Json) -> JsonObject:
    """Write both rotations, as versions 4 and 5 of transformers read them."""
    out = _without_root(config)
    base = out[_LOCAL] = 10000.0 if out[_LOCAL] is None else out[_LOCAL]
    windowed = {"rope_type": "default", "rope_theta": base}
    return {**out, _PARAMETERS: {"full_attention": out[_PARAMETERS], "sliding_attention": windowed}}


def _scalar(model: ModelConfig) -> int:
    """``query_pre_attn_scalar``, a whole number s for the softmax scale 1 / sqrt(s)."""
    if model.softmax_scale is None:
        return model.head_dim
    return max(1, round(max(model.softmax_scale, 1e-9) ** -2))


_FIXED = (
    *LLAMA.ours_fixed,
    ("add_bias_linear", False),
    ("add_qkv_bias", False),
    ("apply_layernorm_1p", True),
    ("norm_position", "both"),
)
_LIMITS = (
    *DENSE_LIMITS,
    EVEN_HEADS,
    Limit(
        lambda m: m.embedding_multiplier == math.sqrt(m.hidden_size),
        "`embedding_multiplier` must be the root of the hidden size",
    ),
    Limit(
        lambda m: math.isclose(_scalar(m) ** -0.5, m.softmax_scale or m.head_dim**-0.5, rel_tol=1e-12),
        "`softmax_scale` must be 1 / sqrt(a whole number)",
    ),
)
_RULES = rules_with(
    MLP,
    layer_norms(
        input_norm="input_layernorm",
        attention_out_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    ),
)
_SETTINGS = (
    *with_defaults(
        without(UNBIASED_SETTINGS, "hidden_act"),
        num_hidden_layers=_LAYERS,
        hidden_size=_WIDTH,
        intermediate_size=9216,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    FieldPair(
        "hidden_activation", "activation", "gelu_pytorch_tanh", words=(("gelu_pytorch_tanh", "geglu"),)
    ),
    FieldPair(
        "query_pre_attn_scalar", "softmax_scale", 256, resolved=_scalar, taken=lambda scalar: scalar**-0.5
    ),
    FieldPair(_ROOT, "embedding_multiplier", 1.0),
    FieldPair(_SCORES, "attn_logit_softcapping", None, float),
    FieldPair(_LOGITS, "final_logit_softcapping", None, float),
    WINDOW,
    WINDOWED_LAYERS,
)

GEMMA2 = replace(
    LLAMA,
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    rules=_RULES,
    settings=_SETTINGS,
    fixed=(("attention_bias", False), (_BOTH_WAYS, False)),
    ours_fixed=_FIXED,
    limits=_LIMITS,
    plain=lambda config: {_SCORES: 50.0, _LOGITS: 30.0, **_plain(config, 2)},
    complete=with_listed(_without_root),
)

GEMMA3 = replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    rules=(*_RULES, *HEAD_NORMS),
    settings=(
        *with_defaults(_SETTINGS, max_position_embeddings=131_072),
        FieldPair(_LOCAL, "window_rotary_base", None, float),
    ),
    ours_fixed=(*_FIXED, ("qk_layernorm", True), ("qk_layernorm_scope", "head")),
    limits=(
        *_LIMITS,
        Limit(
            lambda m: (m.window_rotary_base is not None) == m.has_windows,
            "`window_rotary_base` must be set where layers have a window, and only there",
        ),
    ),
    plain=_plain_gemma3,
    complete=with_listed(_with_rotations),
)
