"""Variants of the layers by name, as settings of the model; the empty name has none."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "": {},
        "qwen": {
            "qk_layernorm": True,
            "kv_channels": 8,  # the norm of two channels makes much of rounding where both are small
            "apply_wd_to_qk_layernorm": True,
            "apply_layernorm_1p": True,
            "attention_output_gate": True,
        },
        "olmo": {
            "norm_position": "output",
            "qk_layernorm": True,
            "kv_channels": 6,
            "qk_layernorm_scope": "projection",
        },
        "gemma": {
            "norm_position": "both",
            "apply_layernorm_1p": True,
            "activation": "geglu",
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 2.0,
            "embedding_multiplier": 32**0.5,
            "softmax_scale": 0.3,
            "position_embedding_type": "rope",
            "window_size": (3, 0),
            "window_attn_skip_freq": (2,),
            "window_rotary_base": 50.0,
        },
        "neox": {"use_parallel_residual": True},
        "cohere": {
            "normalization": "LayerNorm",
            "norm_bias": False,
            "use_parallel_residual": True,
            "share_parallel_norm": True,
            "position_embedding_type": "rope",
            "rotary_interleaved": True,
            "no_rope_freq": (2,),
            "logits_multiplier": 0.6,
        },
        "gpt-oss": {
            "activation": "quick_geglu",
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 2.0,
            "softmax_type": "learnable",
            "moe_router_bias": True,
            "residual_multiplier": 0.7,
            "logits_multiplier": 1.5,
            "window_size": (4, 0),
            "window_attn_skip_freq": (2,),
        },
    }
)
