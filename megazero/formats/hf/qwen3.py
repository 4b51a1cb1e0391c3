"""Qwen3 and Qwen3-MoE (Yang et al. 2025) as transformers' Qwen3ForCausalLM and Qwen3MoeForCausalLM.

They are Qwen2 and Qwen2-MoE with norms of each head's queries and keys instead of biases, and without shared
experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megazero.checkpoint.naming import without_experts
from megazero.formats.hf import qwen2_moe
from megazero.formats.hf.architecture import Json
from megazero.formats.hf.experts import LIMITS, OURS_FIXED, UNSHARED, expert_rules
from megazero.formats.hf.llama import (
    EVEN_HEADS,
    HEAD_NORMS,
    LAYER,
    LLAMA,
    MLP,
    rules_with,
    with_defaults,
    without,
)
from megazero.formats.hf.qwen2 import QWEN2
from megazero.formats.hf.qwen2_moe import EXPERTS_SOMEWHERE, QWEN2_MOE
from megazero.formats.hf.windows import KINDS, NO_WINDOWS, WIDTH

HEADS_NORMED = (("qk_layernorm", True), ("qk_layernorm_scope", "head"), ("add_qkv_bias", False))
_EXPERTS = ("num_experts", "num_local_experts")


def plain_moe(config: Json) -> dict[str, Any]:
    """`config` as Qwen2-MoE has it; version 5 of transformers writes another name for the number of experts.

    Raises:
        ValueError: see `qwen2_moe.plain`.
    """
    name, other = _EXPERTS
    return qwen2_moe.plain({name: config[other], **config} if other in config else config)


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
    plain=plain_moe,
    complete=LLAMA.complete,
    seen=LLAMA.seen,
)
