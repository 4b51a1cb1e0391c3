"""Granite (IBM 2024) as transformers' GraniteForCausalLM: Llama with four constant factors."""

from __future__ import annotations

from dataclasses import replace

from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.architecture import PLAIN_HEADS, FieldPair
from megazero.formats.hf.llama import LLAMA


def _divisor(model: ModelConfig) -> float:
    """The shortest number whose inverse is the model's factor, so that a folder is written as it was read."""
    inverse = 1 / model.logits_multiplier
    shorter = (float(f"{inverse:.{digits}g}") for digits in (12, 15, 16))
    return next((number for number in shorter if 1 / number == model.logits_multiplier), inverse)


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
        # transformers divides by it.
        FieldPair(
            "logits_scaling",
            "logits_multiplier",
            1.0,
            resolved=_divisor,
            taken=lambda divisor: 1 / divisor,
        ),
    ),
    limits=(*LLAMA.limits, PLAIN_HEADS),
)
