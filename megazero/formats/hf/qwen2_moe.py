"""Qwen2-MoE (Qwen Team 2024) as transformers' Qwen2MoeForCausalLM: many small experts, and shared ones.

All tokens go through the shared experts, whose output a sigmoid gate scales. Any layer may be dense.
transformers always has shared experts, so a model without them is written with one channel of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megazero.checkpoint.naming import Table, TensorRule, with_experts, with_shared_experts, without_experts
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.architecture import (
    PLAIN_HEADS,
    FieldPair,
    Json,
    JsonObject,
    Limit,
    TensorLike,
    layers_of,
)
from megazero.formats.hf.experts import (
    CHOSEN,
    LIMITS,
    OURS_FIXED,
    OVER_CHOSEN,
    expert_rules,
    number_of_experts,
    shared_rules,
    stacked_rules,
)
from megazero.formats.hf.llama import (
    LAYER,
    LLAMA,
    MLP,
    UNBIASED_SETTINGS,
    rules_with,
    with_defaults,
)
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import WINDOW, WINDOWED_LAYERS, plain_layers, with_layers
from megazero.spec.model import LayerSpec
from megazero.spec.resolve import model_spec

_BLOCK = f"{LAYER}.mlp"
_SHARED = f"{_BLOCK}.shared_expert"
_STEP, _DENSE = "decoder_sparse_step", "mlp_only_layers"

_SHARED_RULES = (
    *shared_rules(_SHARED),
    TensorRule("layers.{i}.mlp.shared_gate.weight", "1 h", f"{_SHARED}_gate.weight", "1 h"),
)


def _without_shared_experts(layer: LayerSpec) -> bool:
    return with_experts(layer) and not with_shared_experts(layer)


BLANK = tuple(
    replace(
        rule,
        dims=rule.dims.replace("w", "1"),
        their_dims=rule.their_dims.replace("w", "1"),
        layer=_without_shared_experts,
    )
    for rule in _SHARED_RULES
)
"""Rules for one channel of zeros instead of shared experts."""


def shared_seen(model: ModelConfig, tensors: Mapping[str, TensorLike]) -> ModelConfig:
    """The model, without shared experts if they are the one channel of zeros that stands for none."""
    bare = model.model_copy(
        update={"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
    )
    if model.moe_shared_expert_intermediate_size != 1:
        return model
    links = Table.of(BLANK, model_spec(bare), vocab_size=1).links
    return bare if all(_is_zero(tensors.get(link.theirs), link.their_shape) for link in links) else model


def _is_zero(tensor: TensorLike | None, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.shape == shape and not tensor.rows(slice(0, shape[0])).any()


def plain(config: Json) -> JsonObject:
    """Flatten the rope fields and windows, and give the layers with experts as an interval or as a list.

    Raises:
        ValueError: they are not given as numbers, or something else is not supported.
    """
    out = plain_layers(plain_rope(config), layers=QWEN2_LAYERS, first=None)
    step, dense = out.get(_STEP, 1), out.get(_DENSE) or []
    if type(step) is not int or step < 1:
        raise ValueError(f"`{_STEP}` must be a positive number, but is {step!r:.40}")
    if not isinstance(dense, list) or not all(type(number) is int and number >= 0 for number in dense):
        raise ValueError(f"`{_DENSE}` must be a list of layers, but is {dense!r:.100}")
    out[_STEP], out[_DENSE] = step, None
    if dense:
        numbers = range(layers_of(out, QWEN2_LAYERS))
        out[_STEP] = None
        out[_DENSE] = tuple(int(number not in dense and (number + 1) % step == 0) for number in numbers)
    return out


def sparse_step(model: ModelConfig) -> int:
    """The interval n if exactly every n-th layer has experts; else 1."""
    first = next(number for number in range(model.num_layers) if model.experts_at(number))
    regular = all(
        (model.experts_at(number) > 0) == ((number + 1) % (first + 1) == 0)
        for number in range(model.num_layers)
    )
    return first + 1 if regular else 1


def dense_layers(model: ModelConfig) -> list[int]:
    """The layers without experts; empty if `sparse_step` already gives them."""
    if sparse_step(model) > 1:
        return []
    return [number for number in range(model.num_layers) if not model.experts_at(number)]


EXPERTS_SOMEWHERE = Limit(
    lambda m: not m.num_experts or m.expert_places > 0, "at least one layer must have experts"
)
QWEN2_LAYERS = 24
QWEN2_MOE = replace(
    LLAMA,
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    rules=rules_with(
        (
            *(replace(rule, layer=without_experts) for rule in MLP),
            *expert_rules(_BLOCK, "gate_proj", "up_proj", "down_proj"),
            *(replace(rule, layer=with_shared_experts) for rule in _SHARED_RULES),
        )
    ),
    stacked=stacked_rules(_BLOCK),
    blank=BLANK,
    settings=(
        *with_defaults(
            UNBIASED_SETTINGS,
            num_hidden_layers=QWEN2_LAYERS,
            hidden_size=2048,
            intermediate_size=5632,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=32768,
        ),
        FieldPair("qkv_bias", "add_qkv_bias", True),
        FieldPair(_STEP, "expert_interval", None, int, resolved=sparse_step),
        FieldPair(_DENSE, "moe_layer_freq", None, tuple, resolved=dense_layers),
        number_of_experts("num_experts", 60),
        CHOSEN,
        OVER_CHOSEN,
        FieldPair("moe_intermediate_size", "moe_ffn_hidden_size", 1408, resolved="expert_ffn_size"),
        FieldPair(
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            5632,
            resolved=lambda model: model.moe_shared_expert_intermediate_size or 1,
        ),
        WINDOW,
        WINDOWED_LAYERS,
    ),
    ours_fixed=OURS_FIXED,
    implied=(*LLAMA.implied, ("moe_shared_expert_gate", True)),
    limits=(
        *LIMITS,
        PLAIN_HEADS,
        EXPERTS_SOMEWHERE,
        Limit(
            lambda m: m.moe_shared_expert_intermediate_size is None or m.moe_shared_expert_gate,
            "shared experts must be weighed by a gate (`moe_shared_expert_gate`)",
        ),
    ),
    plain=plain,
    complete=with_layers(LLAMA.complete),
    seen=shared_seen,
)
