"""DeepSeek-V2 and V3 (DeepSeek-AI 2024) as transformers' DeepseekV2- and DeepseekV3ForCausalLM.

Multi-head latent attention makes keys and values from one compressed vector per token. The first layers are
dense; the others have many small experts and shared ones. V3 scores experts by sigmoids, plus a bias per
expert that training moves to balance loads. transformers has no multi-token prediction and drops V3's layer
for it.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import TensorRule, with_experts, with_shared_experts, without_experts
from megazero.checkpoint.part import ROUTER
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.architecture import (
    COMMON_LIMITS,
    UNGROUPED,
    FieldPair,
    Json,
    JsonObject,
    Limit,
    layers_of,
    without_own_code,
)
from megazero.formats.hf.experts import (
    ALIKE_EXPERTS,
    CHOSEN,
    GROUPS,
    NO_DROPS,
    OURS_FIXED,
    SCALED,
    SEVERAL_CHOSEN,
    UNGATED,
    expert_rules,
    groups_scored_by,
    number_of_experts,
    shared_rules,
)
from megazero.formats.hf.llama import (
    LAYER,
    LLAMA,
    MLP,
    UNBIASED_SETTINGS,
    rules_with,
    with_defaults,
    without,
)
from megazero.formats.hf.qwen2_moe import EXPERTS_SOMEWHERE
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import NO_WINDOWS
from megazero.spec.model import LayerSpec
from megazero.spec.parts import LatentAttentionSpec

_BLOCK = f"{LAYER}.mlp"
_DENSE, _SHARED, _WIDTH = "first_k_dense_replace", "n_shared_experts", "moe_intermediate_size"
_GROUPS, _CHOSEN_GROUPS, _METHOD = "n_group", "topk_group", "topk_method"
_KIND = "rope_scaling.rope_type"
_NORM_EPSILON = 1e-6


def _attention(ours: str, dims: str, theirs: str, their_dims: str, small: bool | None = None) -> TensorRule:
    """A rule for latent attention; `small`: whether it needs compressed queries, or plain ones (False)."""

    def present(layer: LayerSpec) -> bool:
        part = layer.attention
        return isinstance(part, LatentAttentionSpec) and small in (None, part.query_rank is not None)

    name = f"{LAYER}.self_attn.{theirs}.weight"
    return TensorRule(f"layers.{{i}}.attention.{ours}.weight", dims, name, their_dims, layer=present)


_LATENT = (
    _attention("query", "q d r", "q_proj", "(q d) r", small=False),
    _attention("query_down", "r h", "q_a_proj", "r h", small=True),
    _attention("query_norm", "r", "q_a_layernorm", "r", small=True),
    _attention("query", "q d r", "q_b_proj", "(q d) r", small=True),
    _attention("latent_down", "z h", "kv_a_proj_with_mqa", "z h"),
    _attention("latent_norm", "l", "kv_a_layernorm", "l"),
    _attention("latent_up", "q y l", "kv_b_proj", "(q y) l"),
    _attention("out", "h a", "o_proj", "h a"),
)
_RULES = rules_with(
    (
        *(replace(rule, layer=without_experts) for rule in MLP),
        *expert_rules(_BLOCK, "gate_proj", "up_proj", "down_proj"),
        *(replace(rule, layer=with_shared_experts) for rule in shared_rules(f"{_BLOCK}.shared_experts")),
    ),
    attention=_LATENT,
)
_CHOICE_BIAS = TensorRule(
    f"layers.{{i}}.mlp.router.bias/{ROUTER}",
    "x",
    f"{_BLOCK}.gate.e_score_correction_bias",
    "x",
    layer=with_experts,
)


def _plain(config: Json, assumed: Json) -> JsonObject:
    """Flatten the rope fields, list the layers with experts, and sum the widths of shared experts.

    Args:
        config: the fields of ``config.json``.
        assumed: the values that transformers assumes for missing fields.
    """
    out = {**assumed, **without_own_code(config)}
    for field in ("rope_scaling", "rope_parameters"):
        scaling = out.get(field)
        # Attention's own scale would use `mscale_all_dim`, while the rotation ignores it without `mscale`.
        if isinstance(scaling, dict) and scaling.get("mscale_all_dim") and not scaling.get("mscale"):
            raise ValueError(f"`{field}` must have `mscale` beside `mscale_all_dim`, but is {scaling!r:.200}")
    out = plain_rope(out)
    layers, dense = layers_of(out, 0), out[_DENSE]
    if type(dense) is not int or not 0 <= dense < layers:
        raise ValueError(f"`{_DENSE}` must be less than the {layers} layers, but is {dense!r:.40}")
    for field in (_SHARED, _WIDTH):
        if type(out[field]) is not int or out[field] < 1:
            raise ValueError(f"`{field}` must be a positive number, but is {out[field]!r:.40}")
    out[_DENSE] = tuple(int(number >= dense) for number in range(layers))
    out[_SHARED] *= out[_WIDTH]
    if out.get(_GROUPS) == 1:
        out[_GROUPS] = out[_CHOSEN_GROUPS] = None
    return out


def _plain_v3(config: Json) -> JsonObject:
    assumed = {"num_hidden_layers": 61, "q_lora_rank": 1536, _DENSE: 3, _SHARED: 1, _WIDTH: 2048}
    return _plain(config, {**assumed, _GROUPS: 8, _CHOSEN_GROUPS: 4})


def _plain_v2(config: Json) -> JsonObject:
    out = _plain(config, {"num_hidden_layers": 32, "q_lora_rank": 1536, _DENSE: 0, _SHARED: 2, _WIDTH: 1407})
    method = out.pop(_METHOD, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"`{_METHOD}` must be greedy or group_limited_greedy, but is {method!r:.40}")
    return out if method == "group_limited_greedy" else {**out, _GROUPS: None, _CHOSEN_GROUPS: None}


def _complete_v3(config: Json) -> JsonObject:
    out = LLAMA.complete(config)
    return {**out, _GROUPS: out[_GROUPS] or 1, _CHOSEN_GROUPS: out[_CHOSEN_GROUPS] or 1}


def _complete_v2(config: Json) -> JsonObject:
    out = LLAMA.complete(config)
    return {**out, _METHOD: "greedy" if out[_GROUPS] is None else "group_limited_greedy"}


def _first_with_experts(model: ModelConfig) -> int:
    numbers = range(model.num_layers)
    return next((number for number in numbers if model.experts_at(number)), model.num_layers)


_LIMITS = (
    *COMMON_LIMITS,
    *ALIKE_EXPERTS,
    NO_DROPS,
    NO_WINDOWS,
    EXPERTS_SOMEWHERE,
    UNGROUPED,
    Limit(lambda m: m.qk_pos_emb_head_dim % 2 == 0, "a head must have an even number of rotated channels"),
    Limit(
        lambda m: m.position_embedding_type in ("rope", "yarn", "none"),
        "tokens must learn their positions by rotation alone",
    ),
    Limit(
        lambda m: not m.scales_by_yarn or not m.mscale_all_dim or m.mscale > 0,
        "`mscale` must be positive where `mscale_all_dim` is",
    ),
    Limit(
        lambda m: m.norm_epsilon == _NORM_EPSILON,
        f"`norm_epsilon` must be {_NORM_EPSILON}, as transformers always has it in norms of small vectors",
    ),
    Limit(
        lambda m: all(m.experts_at(n) for n in range(_first_with_experts(m), m.num_layers)),
        "dense layers must come before all layers with experts",
    ),
    Limit(
        lambda m: (m.moe_shared_expert_intermediate_size or 1) % m.expert_ffn_size == 0,
        "there must be shared experts, each as wide as the others",
    ),
    UNGATED,
)

DEEPSEEK_V3 = replace(
    LLAMA,
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    rules=(*_RULES, _CHOICE_BIAS),
    ignored=(*LLAMA.ignored, r"model\.layers\.(?P<further>\d{1,9})\.eh_proj\.weight"),
    settings=(
        *with_defaults(
            without(UNBIASED_SETTINGS, "head_dim", _KIND),
            hidden_size=7168,
            intermediate_size=18432,
            num_attention_heads=128,
            num_key_value_heads=128,
            max_position_embeddings=4096,
        ),
        FieldPair(_KIND, "rope_type", "rope", words=(("rope", "rope"), ("yarn", None), ("yarn", "yarn"))),
        FieldPair("q_lora_rank", "q_lora_rank", None, int),
        FieldPair("kv_lora_rank", "kv_lora_rank", 512),
        FieldPair("qk_nope_head_dim", "qk_head_dim", 128),
        FieldPair("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
        FieldPair("v_head_dim", "v_head_dim", 128),
        FieldPair(_DENSE, "moe_layer_freq", None, tuple, resolved=_first_with_experts),
        number_of_experts("n_routed_experts", 256),
        replace(CHOSEN, default=8),
        FieldPair(_WIDTH, "moe_ffn_hidden_size", 2048, resolved="expert_ffn_size"),
        FieldPair(
            _SHARED,
            "moe_shared_expert_intermediate_size",
            None,
            int,
            resolved=lambda m: (m.moe_shared_expert_intermediate_size or 0) // m.expert_ffn_size,
        ),
        *GROUPS,
        SCALED,
    ),
    fixed=(
        ("attention_bias", False),
        ("moe_layer_freq", 1),
        ("norm_topk_prob", True),
        ("rope_interleave", True),
    ),
    ours_fixed=(
        *(pair for pair in OURS_FIXED if pair[0] not in ("moe_router_score_function", "rotary_percent")),
        ("multi_latent_attention", True),
        ("qk_layernorm", True),
        ("moe_router_score_function", "sigmoid"),
    ),
    implied=(*LLAMA.implied, ("position_embedding_type", "rope"), ("moe_router_enable_expert_bias", True)),
    limits=(*_LIMITS, groups_scored_by(2), SEVERAL_CHOSEN),
    plain=_plain_v3,
    complete=_complete_v3,
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    rules=_RULES,
    ignored=LLAMA.ignored,
    settings=with_defaults(
        DEEPSEEK_V3.settings,
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        num_key_value_heads=None,
        max_position_embeddings=2048,
        n_routed_experts=64,
        num_experts_per_tok=2,
        moe_intermediate_size=1407,
        routed_scaling_factor=1.0,
    ),
    # transformers never divides the gates of a token's experts by their sum, whatever `norm_topk_prob` says.
    fixed=(("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1), ("norm_topk_prob", False)),
    ours_fixed=(
        *(pair for pair in DEEPSEEK_V3.ours_fixed if pair[0] != "moe_router_score_function"),
        ("moe_router_score_function", "softmax"),
        ("moe_router_pre_softmax", True),
    ),
    implied=(*LLAMA.implied, ("position_embedding_type", "rope")),
    limits=(*_LIMITS, groups_scored_by(1)),
    plain=_plain_v2,
    complete=_complete_v2,
)
