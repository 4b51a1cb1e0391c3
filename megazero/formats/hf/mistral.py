"""Mistral (Jiang et al. 2023) and Mixtral (2024) as transformers' MistralForCausalLM and MixtralForCausalLM.

Mistral is Llama with a sliding window; Mixtral has experts in every layer, and gates that are the softmax
over a token's chosen experts.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.formats.hf.architecture import DENSE_LIMITS
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
from megazero.formats.hf.llama import (
    EVEN_HEADS,
    LAYER,
    LLAMA,
    UNBIASED_SETTINGS,
    rules_with,
    with_defaults,
    without,
)
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import ALIKE, WIDTH, WINDOW

_BLOCK = f"{LAYER}.block_sparse_moe"


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
    # transformers takes a missing width for 4096; null is no window.
    plain=lambda config: {WIDTH: 4096, **plain_rope(config)},
)

MIXTRAL = replace(
    LLAMA,
    name="MixtralForCausalLM",
    model_type="mixtral",
    # Mistral's own names: w1 is the gate, w3 the value, w2 the way down.
    rules=rules_with(expert_rules(_BLOCK, "w1", "w3", "w2")),
    stacked=stacked_rules(_BLOCK),
    # transformers 5 calls the block `mlp` in memory, and so does a state saved without its help.
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
