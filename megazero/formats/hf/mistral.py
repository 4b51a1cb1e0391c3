"""Mistral (Jiang et al. 2023) as transformers' MistralForCausalLM: Llama with a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megazero.formats.hf.architecture import DENSE_LIMITS, Json
from megazero.formats.hf.llama import EVEN_HEADS, LLAMA, UNBIASED_SETTINGS, with_defaults
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import ALIKE, WIDTH, WINDOW


def plain(config: Json) -> dict[str, Any]:
    """`config` with the window that transformers assumes unless it is null, and its rotation flat.

    Raises:
        ValueError: see `plain_rope`.
    """
    return {WIDTH: 4096, **plain_rope(config)}


MISTRAL = replace(
    LLAMA,
    name="MistralForCausalLM",
    model_type="mistral",
    settings=(
        *with_defaults(
            UNBIASED_SETTINGS,
            num_key_value_heads=8,
            intermediate_size=14336,
            max_position_embeddings=4096 * 32,
        ),
        WINDOW,
    ),
    ours_fixed=(*LLAMA.ours_fixed, ("add_bias_linear", False), ("add_qkv_bias", False)),
    limits=(*DENSE_LIMITS, EVEN_HEADS, ALIKE),
    plain=plain,
)
