"""gpt-oss (OpenAI 2025) as transformers' GptOssForCausalLM: biases everywhere, experts in every layer.

Each head learns an attention sink, a logit that its softmax adds to those of the keys, and every second layer
has a window. The matrices of experts are [in, out], the transpose of the other architectures', and gates and
values alternate channel by channel.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import TensorRule
from megazero.formats.hf.architecture import FieldPair, Json, JsonObject, Limit
from megazero.formats.hf.experts import (
    CHOSEN,
    EVERYWHERE,
    LIMITS,
    OURS_FIXED,
    UNSHARED,
    number_of_experts,
    width_of_experts,
)
from megazero.formats.hf.llama import LAYER, LLAMA, UNBIASED_SETTINGS, rules_with, with_defaults, without
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import WINDOW, WINDOWED_LAYERS, plain_listed, with_listed

_OURS, _THEIRS = "layers.{i}.mlp", f"{LAYER}.mlp"
_LENGTH = 4096


def _plain(config: Json) -> JsonObject:
    """List the layers with windows, and flatten the rope fields, which transformers assumes to be YaRN's."""
    out = plain_listed(config, layers=36, width=128, interval=2)
    if out.get("rope_parameters") is None and out.get("rope_scaling") is None:
        out["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": _LENGTH,
        }
    return {"rope_theta": 150_000.0, **plain_rope(out)}


GPT_OSS = replace(
    LLAMA,
    name="GptOssForCausalLM",
    model_type="gpt_oss",
    rules=(
        *rules_with(
            (
                TensorRule(f"{_OURS}.router.weight", "x h", f"{_THEIRS}.router.weight", "x h"),
                TensorRule(f"{_OURS}.router.logit_bias", "x", f"{_THEIRS}.router.bias", "x"),
                TensorRule(
                    f"{_OURS}.experts.up.weight", "x 2 m h", f"{_THEIRS}.experts.gate_up_proj", "x h (m 2)"
                ),
                TensorRule(
                    f"{_OURS}.experts.up.bias", "x 2 m", f"{_THEIRS}.experts.gate_up_proj_bias", "x (m 2)"
                ),
                TensorRule(f"{_OURS}.experts.down.weight", "x h m", f"{_THEIRS}.experts.down_proj", "x m h"),
                TensorRule(f"{_OURS}.experts.down.bias", "x h", f"{_THEIRS}.experts.down_proj_bias", "x h"),
            )
        ),
        TensorRule("layers.{i}.attention.softmax_offset", "q", f"{LAYER}.self_attn.sinks", "q"),
    ),
    settings=(
        *with_defaults(
            without(UNBIASED_SETTINGS, "intermediate_size", "hidden_act"),
            num_hidden_layers=36,
            hidden_size=2880,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
        ),
        width_of_experts(2880),
        number_of_experts("num_local_experts", 128),
        CHOSEN,
        FieldPair("swiglu_limit", "activation_func_clamp_value", 7.0),
        WINDOW,
        WINDOWED_LAYERS,
    ),
    fixed=(("attention_bias", True), ("hidden_act", "silu"), ("swiglu_alpha", 1.702)),
    ours_fixed=(
        *(pair for pair in OURS_FIXED if pair[0] != "add_bias_linear"),
        ("add_bias_linear", True),
        ("activation", "quick_geglu"),
        ("glu_linear_offset", 1.0),
        ("softmax_type", "learnable"),
        ("moe_router_bias", True),
        ("moe_router_pre_softmax", False),
    ),
    limits=(
        *LIMITS,
        UNSHARED,
        EVERYWHERE,
        Limit(lambda m: m.activation_func_clamp_value is not None, "the values of gates must be bounded"),
    ),
    plain=_plain,
    # Without `rope_scaling`, version 4 assumes YaRN.
    complete=with_listed(lambda config: {"rope_scaling": {"rope_type": "default"}, **LLAMA.complete(config)}),
)
