"""Bamba (IBM 2024) as transformers' BambaForCausalLM: a mixer or attention, then an MLP, in every layer.

Each of its layers is two of megazero's, with the letters M and -, or * and -, of a hybrid pattern. Attention
rotates a part of its channels.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from megazero.checkpoint.naming import TensorRule, of_kinds
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.architecture import PLAIN_HEADS, FieldPair, Json, JsonObject, Limit, layers_of
from megazero.formats.hf.llama import LLAMA, UNBIASED_SETTINGS, rules_with, with_defaults, without
from megazero.formats.hf.neox import EVEN_SHARE, PARTIAL, SCALINGS, SHARE, rotated
from megazero.formats.hf.rope import with_rope_parameters
from megazero.formats.hf.state_space import (
    EXPANDED_LIMITS,
    LEAST_STEP,
    LETTERS,
    OURS_FIXED,
    PATTERN,
    complete_mixers,
    mixer,
    plain_mixers,
    shape,
)
from megazero.formats.hf.windows import NO_WINDOWS

_LAYER = "model.layers.{i/2}"
_RULES, _FUSED = mixer(f"{_LAYER}.mamba")
_LAYERS, _ATTENTION = "num_hidden_layers", "attn_layer_indices"
_EXPAND, _HEADS, _WIDTH = _MIXER = ("mamba_expand", "mamba_n_heads", "mamba_d_head")
_SHARE = 0.5
_NAMES = MappingProxyType({"attention.": "*", "mlp.": "-"})


def _halved(rule: TensorRule) -> TensorRule:
    """A rule of Llama, moved to that half of Bamba's layer which is a layer here."""
    if "{i}" not in rule.ours:
        return replace(rule, theirs=rule.theirs.replace("model.norm.", "model.final_layernorm."))
    letters = next(
        letters for name, letters in _NAMES.items() if rule.ours.startswith(f"layers.{{i}}.{name}")
    )
    theirs = rule.theirs.replace("{i}", "{i/2}").replace(".mlp.", ".feed_forward.")
    return replace(rule, theirs=theirs, layer=of_kinds(letters))


def _plain(config: Json) -> JsonObject:
    """Write the pattern of layers as letters, and flatten the rope fields."""
    out = dict(config)
    # Whatever this field says, transformers rotates half of the channels.
    if out.pop(PARTIAL, None) not in (None, _SHARE):
        raise ValueError(f"`{PARTIAL}` must be {_SHARE}, but is {config[PARTIAL]!r:.40}")
    layers = layers_of(out, 32)
    attention = out.pop(_ATTENTION, None) or []
    if not isinstance(attention, list) or not all(type(n) is int and 0 <= n < layers for n in attention):
        raise ValueError(f"`{_ATTENTION}` must list layers from 0 to {layers - 1}, but is {attention!r:.100}")
    if out.get(_WIDTH, "auto") == "auto":
        sizes = out.get(_EXPAND, 2), out.get("hidden_size", 4096), out.get(_HEADS, 128)
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"`{_WIDTH}` must be a number where it does not follow from others")
        out[_WIDTH] = sizes[0] * sizes[1] // sizes[2]
    letters = ("*-" if number in attention else "M-" for number in range(layers))
    out = {**plain_mixers(out, *_MIXER), _LAYERS: layers, PATTERN: "".join(letters)}
    return rotated(out, _SHARE)


def _complete(config: Json) -> JsonObject:
    out = with_rope_parameters(complete_mixers(config, *_MIXER))
    share, letters = out.pop(SHARE), out.pop(PATTERN)
    for field in SCALINGS:
        if field in out:
            out[field] = {**out[field], PARTIAL: share}
    return {**out, _ATTENTION: [number for number, letter in enumerate(letters[::2]) if letter == "*"]}


def _in_pairs(model: ModelConfig) -> bool:
    letters = model.layer_kinds or ""
    return len(letters) % 2 == 0 and set(letters[::2]) <= {"M", "*"} and set(letters[1::2]) == {"-"}


BAMBA = replace(
    LLAMA,
    name="BambaForCausalLM",
    model_type="bamba",
    rules=(
        *map(_halved, rules_with(norms=())),
        *(
            TensorRule(
                "layers.{i}.input_norm.weight", "h", f"{_LAYER}.{name}.weight", "h", layer=of_kinds(kinds)
            )
            for name, kinds in (("input_layernorm", "M*"), ("pre_ff_layernorm", "-"))
        ),
        *_RULES,
    ),
    fused=_FUSED,
    settings=(
        FieldPair(
            _LAYERS,
            "num_layers",
            32,
            resolved=lambda model: model.num_layers // 2,
            taken=lambda layers: 2 * layers,
        ),
        LETTERS,
        *with_defaults(
            without(UNBIASED_SETTINGS, _LAYERS, "head_dim"),
            intermediate_size=14336,
            num_key_value_heads=8,
            max_position_embeddings=262144,
            rms_norm_eps=1e-5,
        ),
        FieldPair(SHARE, "rotary_percent", _SHARE),
        *with_defaults(
            shape(_HEADS, _WIDTH, "mamba_d_state", "mamba_n_groups"),
            mamba_d_state=256,
            mamba_n_groups=1,
        ),
        LEAST_STEP,
    ),
    fixed=(
        ("attention_bias", False),
        ("mlp_bias", False),
        ("mamba_proj_bias", False),
        ("mamba_conv_bias", True),
        ("mamba_d_conv", 4),
    ),
    ours_fixed=(
        *OURS_FIXED,
        ("apply_residual_connection_post_layernorm", False),
        ("add_bias_linear", False),
        ("add_qkv_bias", False),
    ),
    limits=(
        *EXPANDED_LIMITS,
        NO_WINDOWS,
        PLAIN_HEADS,
        EVEN_SHARE,
        Limit(lambda m: not m.num_experts, "there must be no experts"),
        Limit(_in_pairs, "the pattern must be of M- and *-, a mixer or attention and then an MLP"),
    ),
    plain=_plain,
    complete=_complete,
)
