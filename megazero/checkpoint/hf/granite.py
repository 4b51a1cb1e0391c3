"""Granite (IBM 2024) as transformers' GraniteForCausalLM: Llama with factors here and there."""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.hf.architecture import FieldPair
from megazero.checkpoint.hf.llama import LLAMA
from megazero.checkpoint.hf.qwen2 import PLAIN_HEADS

GRANITE = replace(
    LLAMA,
    name="GraniteForCausalLM",
    model_type="granite",
    settings=(
        *LLAMA.settings,
        FieldPair("embedding_multiplier", "embedding_multiplier", 1.0),
        FieldPair("residual_multiplier", "residual_multiplier", 1.0),
        FieldPair(
            "attention_multiplier",
            "softmax_scale",
            1.0,
            resolved=lambda model: model.softmax_scale or model.head_dim**-0.5,
        ),
        # Theirs divides; rounded, a number that was inverted twice is the first one again.
        FieldPair(
            "logits_scaling",
            "logits_multiplier",
            1.0,
            resolved=lambda model: round(1 / model.logits_multiplier, 12),
            taken=lambda divisor: 1 / divisor,
        ),
    ),
    limits=(*LLAMA.limits, PLAIN_HEADS),
)
