"""Mixtral (Jiang et al. 2024) as transformers' MixtralForCausalLM: Llama with experts in every layer.

A token's weights are the softmax over the experts that it chose.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.formats.hf.experts import (
    CHOSEN,
    EVERYWHERE,
    LIMITS,
    OURS_FIXED,
    UNSHARED,
    expert_rules,
    number_of_experts,
    stacked_rules,
    width_of_experts,
)
from megazero.formats.hf.llama import LAYER, LLAMA, UNBIASED_SETTINGS, rules_with, with_defaults, without
from megazero.formats.hf.windows import ALIKE, WINDOW

_BLOCK = f"{LAYER}.block_sparse_moe"

MIXTRAL = replace(
    LLAMA,
    name="MixtralForCausalLM",
    model_type="mixtral",
    rules=rules_with(expert_rules(_BLOCK, "w1", "w3", "w2")),
    stacked=stacked_rules(_BLOCK),
    # In memory, transformers 5 calls the block otherwise.
    renamed=(
        (
            r"model\.layers\.(\d+)\.mlp\.(gate\.weight|experts\.gate_up_proj|experts\.down_proj)",
            r"model.layers.\1.block_sparse_moe.\2",
        ),
    ),
    settings=(
        *with_defaults(
            without(UNBIASED_SETTINGS, "intermediate_size"),
            num_key_value_heads=8,
            max_position_embeddings=4096 * 32,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
        ),
        width_of_experts(14336),
        number_of_experts("num_local_experts", 8),
        replace(CHOSEN, default=2),
        WINDOW,
    ),
    ours_fixed=(*OURS_FIXED, ("add_qkv_bias", False), ("moe_router_pre_softmax", False)),
    limits=(*LIMITS, ALIKE, EVERYWHERE, UNSHARED),
)
