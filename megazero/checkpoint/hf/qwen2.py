"""Qwen2 (Yang et al. 2024) as transformers' Qwen2ForCausalLM: Llama with biases of queries, keys, values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megazero.checkpoint.hf.architecture import DENSE_LIMITS, Json, Limit
from megazero.checkpoint.hf.llama import EVEN_HEADS, LLAMA, UNBIASED_SETTINGS, with_defaults
from megazero.checkpoint.hf.rope import plain_rope

PLAIN_HEADS = Limit(
    lambda m: m.head_dim * m.num_attention_heads == m.hidden_size,
    "the width of a head must be hidden size / heads",
)


def plain(config: Json) -> dict[str, Any]:
    """`config` without the sliding window that it may describe but not use, and its rotation flat.

    Raises:
        ValueError: a layer has a sliding window, or see `plain_rope`.
    """
    out = plain_rope(config)
    if out.get("use_sliding_window"):
        raise ValueError("`use_sliding_window` must be False, but is True; it is not supported")
    kinds = out.pop("layer_types", None) or ()
    if any(kind != "full_attention" for kind in kinds):
        raise ValueError(
            f"`layer_types` must be full_attention for all layers, but is {kinds!r:.200}; no other kind is "
            "supported"
        )
    out.pop("sliding_window", None)
    return out


QWEN2 = replace(
    LLAMA,
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    settings=with_defaults(
        UNBIASED_SETTINGS,
        num_key_value_heads=32,
        intermediate_size=22016,
        max_position_embeddings=32768,
    ),
    ours_fixed=(*LLAMA.ours_fixed, ("add_bias_linear", False), ("add_qkv_bias", True)),
    limits=(*DENSE_LIMITS, EVEN_HEADS, PLAIN_HEADS),
    plain=plain,
)
