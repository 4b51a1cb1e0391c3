"""Command R (Cohere 2024, 2025) as transformers' CohereForCausalLM and Cohere2ForCausalLM.

Attention and MLP read the same LayerNorm, which has no bias, and are added to the residual together. RoPE
rotates neighbouring channels against each other. Cohere2 rotates only in layers with a window.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.formats.hf.architecture import DENSE_LIMITS, PLAIN_HEADS, FieldPair, Json, JsonObject, Limit
from megazero.formats.hf.llama import (
    EVEN_HEADS,
    LLAMA,
    UNBIASED_SETTINGS,
    layer_norms,
    rules_with,
    with_defaults,
    without,
)
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import (
    KINDS,
    NO_WINDOWS,
    PATTERN,
    WIDTH,
    WINDOW,
    WINDOWED_LAYERS,
    plain_listed,
    with_listed,
)

_LAYERS, _UNROTATED = 40, "layers without rotation"

_SETTINGS = (
    *with_defaults(
        without(UNBIASED_SETTINGS, "rms_norm_eps", "head_dim"),
        num_hidden_layers=_LAYERS,
        hidden_size=8192,
        intermediate_size=22528,
        num_attention_heads=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    FieldPair("layer_norm_eps", "norm_epsilon", 1e-5),
    FieldPair("logit_scale", "logits_multiplier", 0.0625),
)


def _plain_cohere2(config: Json) -> JsonObject:
    """List the layers with windows and those without rotation, and flatten the rope fields."""
    out = dict(config)
    interval = out.pop(PATTERN, 4)
    if out.pop("head_dim", None) not in (None, _width(out)):
        raise ValueError("`head_dim` must be `hidden_size` / `num_attention_heads`, as it is in transformers")
    out = plain_rope(plain_listed(out, _LAYERS, 4096, interval))
    if out.get(KINDS) is None:
        raise ValueError(f"`{KINDS}` and `{WIDTH}` must give some layers a window, as others do not rotate")
    return {**out, _UNROTATED: tuple(1 - flag for flag in out[KINDS])}


def _width(config: Json) -> int | None:
    size, heads = config.get("hidden_size", 8192), config.get("num_attention_heads", 64)
    return size // heads if type(size) is int and type(heads) is int and heads > 0 else None


def _without_list(config: Json) -> JsonObject:
    out = LLAMA.complete(config)
    del out[_UNROTATED]
    return out


COHERE = replace(
    LLAMA,
    name="CohereForCausalLM",
    model_type="cohere",
    rules=rules_with(norms=layer_norms(input_norm="input_layernorm")),
    settings=_SETTINGS,
    fixed=(("attention_bias", False), ("use_qk_norm", False)),
    ours_fixed=(
        *(setting for setting in LLAMA.ours_fixed if setting[0] != "normalization"),
        ("normalization", "LayerNorm"),
        ("norm_bias", False),
        ("add_bias_linear", False),
        ("add_qkv_bias", False),
        ("use_parallel_residual", True),
        ("share_parallel_norm", True),
        ("rotary_interleaved", True),
    ),
    limits=(*DENSE_LIMITS, NO_WINDOWS, EVEN_HEADS, PLAIN_HEADS),
    plain=lambda config: {"rope_theta": 500_000.0, **plain_rope(config)},
)

COHERE2 = replace(
    COHERE,
    name="Cohere2ForCausalLM",
    model_type="cohere2",
    settings=(
        *_SETTINGS,
        WINDOW,
        WINDOWED_LAYERS,
        FieldPair(_UNROTATED, "no_rope_freq", None, tuple, resolved="unrotated"),
    ),
    fixed=(("attention_bias", False),),
    limits=(
        *DENSE_LIMITS,
        EVEN_HEADS,
        PLAIN_HEADS,
        Limit(
            lambda m: (
                m.has_windows
                and all(m.rotates_at(n) == (m.window_at(n) is not None) for n in range(m.num_layers))
            ),
            "layers with a window must rotate, and no others",
        ),
    ),
    plain=_plain_cohere2,
    complete=with_listed(_without_list),
)
