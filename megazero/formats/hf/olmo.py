"""OLMo-2 and OLMoE (OLMo Team 2024, Muennighoff et al. 2024) as transformers' Olmo2- and OlmoeForCausalLM.

Both are Llama with norms over the channels of all heads' queries and of all heads' keys. OLMo-2 normalizes
the outputs of attention and MLP instead of their inputs; OLMoE has experts in every layer.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.formats.hf.architecture import DENSE_LIMITS, PLAIN_HEADS
from megazero.formats.hf.experts import (
    CHOSEN,
    EVERYWHERE,
    LIMITS,
    OURS_FIXED,
    OVER_CHOSEN,
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
    MLP,
    PROJECTION_NORMS,
    UNBIASED_SETTINGS,
    layer_norms,
    rules_with,
    with_defaults,
    without,
)
from megazero.formats.hf.windows import NO_WINDOWS

_NORMED = (("qk_layernorm", True), ("qk_layernorm_scope", "projection"), ("add_qkv_bias", False))

OLMO2 = replace(
    LLAMA,
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    rules=(
        *rules_with(
            MLP,
            layer_norms(
                attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"
            ),
        ),
        *PROJECTION_NORMS,
    ),
    settings=with_defaults(UNBIASED_SETTINGS, rms_norm_eps=1e-5),
    fixed=(("attention_bias", False),),
    ours_fixed=(*LLAMA.ours_fixed, ("add_bias_linear", False), ("norm_position", "output"), *_NORMED),
    limits=(*DENSE_LIMITS, NO_WINDOWS, EVEN_HEADS, PLAIN_HEADS),
)

OLMOE = replace(
    LLAMA,
    name="OlmoeForCausalLM",
    model_type="olmoe",
    rules=(*rules_with(expert_rules(f"{LAYER}.mlp", "gate_proj", "up_proj", "down_proj")), *PROJECTION_NORMS),
    stacked=stacked_rules(f"{LAYER}.mlp"),
    settings=(
        *with_defaults(
            without(UNBIASED_SETTINGS, "intermediate_size"),
            num_hidden_layers=16,
            hidden_size=2048,
            num_attention_heads=16,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        width_of_experts(2048),
        number_of_experts("num_experts", 64),
        replace(CHOSEN, default=8),
        OVER_CHOSEN,
    ),
    fixed=(("attention_bias", False), ("clip_qkv", None)),
    ours_fixed=(*OURS_FIXED, *_NORMED),
    limits=(*LIMITS, NO_WINDOWS, PLAIN_HEADS, UNSHARED, EVERYWHERE),
)
