"""Qwen2, Qwen3 and Qwen3-MoE (Yang et al. 2024, 2025) as transformers' classes for causal LM.

Qwen2 is Llama with biases of queries, keys and values. Qwen3 and Qwen3-MoE are Qwen2 and Qwen2-MoE with norms
of each head's queries and keys instead of these biases, and without shared experts.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import without_experts
from megazero.formats.hf import qwen2_moe
from megazero.formats.hf.architecture import DENSE_LIMITS, PLAIN_HEADS, Json, JsonObject
from megazero.formats.hf.experts import LIMITS, OURS_FIXED, UNSHARED, expert_rules
from megazero.formats.hf.llama import (
    EVEN_HEADS,
    HEAD_NORMS,
    LAYER,
    LLAMA,
    MLP,
    UNBIASED_SETTINGS,
    rules_with,
    with_defaults,
    without,
)
from megazero.formats.hf.qwen2_moe import EXPERTS_SOMEWHERE, QWEN2_MOE
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import (
    KINDS,
    NO_WINDOWS,
    WIDTH,
    WINDOW,
    WINDOWED_LAYERS,
    plain_layers,
    with_layers,
)

HEADS_NORMED = (("qk_layernorm", True), ("qk_layernorm_scope", "head"), ("add_qkv_bias", False))


def _plain_moe(config: Json) -> JsonObject:
    # Version 5 of transformers writes another name for the number of experts.
    old, new = "num_experts", "num_local_experts"
    return qwen2_moe.plain({old: config[new], **config} if new in config else config)


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
    plain=lambda config: plain_layers(plain_rope(config), layers=32, first=28),
    complete=with_layers(LLAMA.complete),
)

QWEN3 = replace(
    QWEN2,
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    rules=(*LLAMA.rules, *HEAD_NORMS),
    settings=with_defaults(QWEN2.settings, head_dim=128),
    fixed=(("attention_bias", False),),
    ours_fixed=(*LLAMA.ours_fixed, ("add_bias_linear", False), *HEADS_NORMED),
    limits=tuple(limit for limit in LLAMA.limits if limit is not NO_WINDOWS),
)

QWEN3_MOE = replace(
    QWEN2_MOE,
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    rules=(
        *rules_with(
            (
                *(replace(rule, layer=without_experts) for rule in MLP),
                *expert_rules(f"{LAYER}.mlp", "gate_proj", "up_proj", "down_proj"),
            )
        ),
        *HEAD_NORMS,
    ),
    blank=(),
    settings=with_defaults(
        without(QWEN2_MOE.settings, "qkv_bias", "shared_expert_intermediate_size", WIDTH, KINDS),
        intermediate_size=6144,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    fixed=(("attention_bias", False),),
    ours_fixed=(*OURS_FIXED, *HEADS_NORMED),
    implied=LLAMA.implied,
    limits=(*LIMITS, NO_WINDOWS, EVEN_HEADS, EXPERTS_SOMEWHERE, UNSHARED),
    plain=_plain_moe,
    complete=LLAMA.complete,
    seen=LLAMA.seen,
)
