"""Qwen2 (Yang et al. 2024) as transformers' Qwen2ForCausalLM: Llama with biases of queries, keys, values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megazero.formats.hf.architecture import DENSE_LIMITS, PLAIN_HEADS, Json
from megazero.formats.hf.llama import EVEN_HEADS, LLAMA, UNBIASED_SETTINGS, with_defaults
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import WINDOW, WINDOWED_LAYERS, plain_layers, with_layers


def plain(config: Json) -> dict[str, Any]:
    """`config` with the windows that layers have, and its rotation flat.

    Raises:
        ValueError: see `plain_layers` and `plain_rope`.
    """
    return plain_layers(plain_rope(config), layers=32, first=28)


QWEN2 = replace(
    LLAMA,
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    settings=(
        *with_defaults(
            UNBIASED_SETTINGS,
            num_key_value_heads=32,
            intermediate_size=22016,
            max_position_embeddings=32768,
        ),
        WINDOW,
        WINDOWED_LAYERS,
    ),
    ours_fixed=(*LLAMA.ours_fixed, ("add_bias_linear", False), ("add_qkv_bias", True)),
    limits=(*DENSE_LIMITS, EVEN_HEADS, PLAIN_HEADS),
    plain=plain,
    complete=with_layers(LLAMA.complete),
)
