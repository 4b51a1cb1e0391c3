"""Nemotron-H (NVIDIA 2025) as transformers' NemotronHForCausalLM: a pattern of layers with one part each.

A layer is a Mamba-2 mixer, attention without positions, an MLP, or experts. Experts have no gated activation;
the router works as DeepSeek-V3's.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from megazero.checkpoint.naming import TensorRule, of_kinds
from megazero.checkpoint.part import ROUTER
from megazero.formats.hf.architecture import (
    GELUS,
    Architecture,
    FieldPair,
    Json,
    JsonObject,
    Limit,
    pair,
    separate,
    without_own_code,
)
from megazero.formats.hf.experts import (
    ALIKE_EXPERTS,
    CHOSEN,
    GROUPS,
    NO_DROPS,
    SCALED,
    SEVERAL_CHOSEN,
    UNGATED,
    groups_scored_by,
)
from megazero.formats.hf.state_space import (
    LETTERS,
    LIMITS,
    OURS_FIXED,
    PATTERN,
    STEP_LIMITS,
    least_step,
    mixer,
    shape,
)
from megazero.formats.hf.windows import NO_WINDOWS

_LAYER = "backbone.layers.{i}"
_MIXER = f"{_LAYER}.mixer"
_RULES, _FUSED = mixer(_MIXER)
_KINDS, _OLD_PATTERN, _LAYERS = "layers_block_type", "hybrid_override_pattern", "num_hidden_layers"
_LETTERS = MappingProxyType({"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"})
_OLD_KINDS = MappingProxyType({"mamba": "M", "attention": "*"})
_SCORES, _BIASED = "scores of experts", "biases of experts"
_NO_STEP = 1e-30
"""Written for no shortest step, because transformers takes its logarithm; such a step changes no state."""

# Older names -> present ones; if a file has both, transformers reads the older.
_OLD_NAMES = MappingProxyType(
    {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_dt_limit": STEP_LIMITS,
        "mamba_conv_bias": "use_conv_bias",
    }
)
# The values that transformers assumes for missing fields of experts.
_EXPERTS = MappingProxyType(
    {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }
)


def _pattern(config: JsonObject) -> str:
    """The letter of each layer; removes the fields with the kinds of layers from `config`."""
    listed, older = config.pop(_KINDS, None), config.pop(_OLD_PATTERN, None)
    kinds = config.pop("layer_types", None) if listed is None else listed
    if kinds is None and isinstance(older, str):
        return older
    known = {**_LETTERS, **_OLD_KINDS}
    if not isinstance(kinds, list) or not kinds or not {*map(str, kinds)} <= known.keys():
        raise ValueError(
            f"`{_KINDS}` must list the layers, each one of {', '.join(_LETTERS)}, but is {kinds!r:.200}"
        )
    return "".join(known[kind] for kind in kinds)


def _plain(config: Json) -> JsonObject:
    """Write the layers as letters, and drop the fields of experts from a model without experts."""
    out = without_own_code(config)
    for old, name in _OLD_NAMES.items():
        if old in out:
            out[name] = out.pop(old)
    if least_step(out):
        raise ValueError(
            f"`{STEP_LIMITS}` must begin with 0, but does not; transformers reads `time_step_min` instead"
        )
    pattern = _pattern(out)
    if out.get(_LAYERS, len(pattern)) != len(pattern):
        raise ValueError(f"`{_LAYERS}` must be the {len(pattern)} of `{_KINDS}`, but is {out[_LAYERS]!r:.40}")
    out |= {PATTERN: pattern, _LAYERS: len(pattern)}
    if "E" not in pattern:
        return {name: value for name, value in out.items() if name not in _EXPERTS}
    out = {**_EXPERTS, **out, _SCORES: "sigmoid", _BIASED: True}
    if type(out["n_routed_experts"]) is not int:
        raise ValueError(f"`n_routed_experts` must be a number, but is {out['n_routed_experts']!r:.40}")
    out["n_routed_experts"] = (out["n_routed_experts"],)
    if out["n_group"] == 1:
        out["n_group"] = out["topk_group"] = None
    return out


def _complete(config: Json) -> JsonObject:
    out = dict(config)
    kinds = {letter: kind for kind, letter in _LETTERS.items()}
    listed = [kinds[letter] for letter in out.pop(PATTERN)]
    del out[_SCORES], out[_BIASED]
    if "moe" in listed:
        out |= {"n_group": out["n_group"] or 1, "topk_group": out["topk_group"] or 1}
    else:
        out = {name: value for name, value in out.items() if name not in _EXPERTS}
    return {**out, _KINDS: listed}


def _experts(theirs: str, ours: str, dims: str, their_dims: str) -> TensorRule:
    return TensorRule(f"layers.{{i}}.mlp.{ours}", dims, f"{_MIXER}.{theirs}", their_dims, layer=of_kinds("E"))


def _with_experts(limit: Limit) -> Limit:
    return replace(limit, holds=lambda m: not m.num_experts or limit.holds(m))


NEMOTRON_H = Architecture(
    name="NemotronHForCausalLM",
    model_type="nemotron_h",
    auto="AutoModelForCausalLM",
    prefix="backbone.",
    rules=(
        TensorRule("embedding.word.weight", "v h", "backbone.embeddings.weight", "v h"),
        *pair("layers.{i}.input_norm", f"{_LAYER}.norm")[:1],
        *_RULES,
        *(replace(rule, layer=of_kinds("*")) for rule in separate(_MIXER, "q_proj", "k_proj", "v_proj")),
        TensorRule(
            "layers.{i}.attention.out.weight", "h a", f"{_MIXER}.o_proj.weight", "h a", layer=of_kinds("*")
        ),
        TensorRule("layers.{i}.mlp.up.weight", "f h", f"{_MIXER}.up_proj.weight", "f h", layer=of_kinds("-")),
        TensorRule(
            "layers.{i}.mlp.down.weight", "h f", f"{_MIXER}.down_proj.weight", "h f", layer=of_kinds("-")
        ),
        _experts("gate.weight", "router.weight", "x h", "x h"),
        _experts("gate.e_score_correction_bias", f"router.bias/{ROUTER}", "x", "x"),
        _experts("experts.{x}.up_proj.weight", "experts.up.weight", "x m h", "(x m) h"),
        _experts("experts.{x}.down_proj.weight", "experts.down.weight", "x h m", "(x h) m"),
        _experts("shared_experts.up_proj.weight", "shared.up.weight", "w h", "w h"),
        _experts("shared_experts.down_proj.weight", "shared.down.weight", "h w", "h w"),
        *pair("final_norm", "backbone.norm_f")[:1],
        TensorRule("head.weight", "v h", "lm_head.weight", "v h"),
    ),
    stacked=(
        _experts("experts.up_proj", "experts.up.weight", "x m h", "x m h"),
        _experts("experts.down_proj", "experts.down.weight", "x h m", "x h m"),
    ),
    copies=(),
    ignored=(),
    fused=_FUSED,
    settings=(
        FieldPair(_LAYERS, "num_layers", None, int),
        LETTERS,
        FieldPair("hidden_size", "hidden_size", 4096),
        FieldPair("num_attention_heads", "num_attention_heads", 32),
        FieldPair("num_key_value_heads", "num_query_groups", 8, resolved="kv_heads"),
        FieldPair("head_dim", "kv_channels", 128, resolved="head_dim"),
        FieldPair("intermediate_size", "ffn_hidden_size", 21504, resolved="ffn_size"),
        FieldPair("max_position_embeddings", "max_position_embeddings", 4096, resolved="positions"),
        FieldPair("mlp_hidden_act", "activation", "relu2", words=(("relu", "relu"), *GELUS)),
        *shape("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"),
        FieldPair(
            "time_step_min",
            "mamba_min_step",
            1e-3,
            resolved=lambda m: m.mamba_min_step or _NO_STEP,
            taken=lambda step: 0.0 if step <= _NO_STEP else step,
        ),
        FieldPair("layer_norm_epsilon", "norm_epsilon", 1e-5),
        FieldPair("residual_in_fp32", "fp32_residual_connection", False),
        FieldPair("hidden_dropout", "hidden_dropout", 0.0),
        FieldPair("attention_dropout", "attention_dropout", 0.0),
        FieldPair("initializer_range", "init_method_std", 0.02),
        FieldPair("n_routed_experts", "num_experts", (), resolved=lambda m: max(m.num_experts, default=0)),
        replace(CHOSEN, default=1),
        FieldPair("moe_intermediate_size", "moe_ffn_hidden_size", None, int, resolved="expert_ffn_size"),
        FieldPair("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", None, int),
        *GROUPS,
        replace(SCALED, default=None, kind=float),
        FieldPair(_SCORES, "moe_router_score_function", "softmax"),
        FieldPair(_BIASED, "moe_router_enable_expert_bias", False),
    ),
    fixed=(
        ("tie_word_embeddings", False),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_bias", False),
        ("mamba_proj_bias", False),
        ("use_conv_bias", True),
        ("conv_kernel", 4),
        ("mamba_hidden_act", "silu"),
        ("n_shared_experts", 1),
        ("norm_topk_prob", True),
        ("moe_latent_size", None),
        ("num_nextn_predict_layers", 0),
    ),
    ours_fixed=(
        *OURS_FIXED,
        ("position_embedding_type", "none"),
        ("untie_embeddings_and_output_weights", True),
        ("add_bias_linear", False),
        ("add_qkv_bias", False),
    ),
    limits=(
        *LIMITS,
        NO_WINDOWS,
        *map(
            _with_experts,
            (
                *ALIKE_EXPERTS,
                NO_DROPS,
                groups_scored_by(2),
                Limit(lambda m: m.mlp_type == "standard", "`mlp_type` must be standard"),
                Limit(
                    lambda m: m.moe_router_score_function == "sigmoid",
                    "`moe_router_score_function` must be sigmoid",
                ),
                SEVERAL_CHOSEN,
                Limit(
                    lambda m: m.moe_shared_expert_intermediate_size is not None,
                    "there must be shared experts where there are others",
                ),
                UNGATED,
            ),
        ),
    ),
    plain=_plain,
    complete=_complete,
)
