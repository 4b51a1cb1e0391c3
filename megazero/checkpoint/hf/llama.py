"""Llama (Touvron et al. 2023) as transformers' LlamaForCausalLM has it, with grouped-query attention.

Both sides rotate the first half of a head's channels against the second, so weights need no permutation.
"""

from __future__ import annotations

from typing import Any

from megazero.checkpoint.hf.family import COMMON_LIMITS, Family, Json, Limit, Setting
from megazero.checkpoint.rule import Rule, biased, untied

_WORDS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_LAYER = "model.layers.{i}"
_QUERIES, _KEY, _VALUE = ("s", slice(0, -2)), ("s", slice(-2, -1)), ("s", slice(-1, None))
_GATE, _UP = ("c", slice(0, 1)), ("c", slice(1, 2))

RULES = (
    Rule("embedding.word.weight", "v h", _WORDS, "v h"),
    Rule("layers.{i}.input_norm.weight", "h", f"{_LAYER}.input_layernorm.weight", "h"),
    *(
        rule
        for name, take in (("q_proj", _QUERIES), ("k_proj", _KEY), ("v_proj", _VALUE))
        for rule in (
            Rule(
                "layers.{i}.attention.qkv.weight",
                "g s d h",
                f"{_LAYER}.self_attn.{name}.weight",
                "(g s d) h",
                take,
            ),
            Rule(
                "layers.{i}.attention.qkv.bias",
                "g s d",
                f"{_LAYER}.self_attn.{name}.bias",
                "(g s d)",
                take,
                biased,
            ),
        )
    ),
    Rule("layers.{i}.attention.out.weight", "h a", f"{_LAYER}.self_attn.o_proj.weight", "h a"),
    Rule("layers.{i}.attention.out.bias", "h", f"{_LAYER}.self_attn.o_proj.bias", "h", when=biased),
    Rule("layers.{i}.mlp_norm.weight", "h", f"{_LAYER}.post_attention_layernorm.weight", "h"),
    *(
        rule
        for name, take in (("gate_proj", _GATE), ("up_proj", _UP))
        for rule in (
            Rule("layers.{i}.mlp.up.weight", "c f h", f"{_LAYER}.mlp.{name}.weight", "(c f) h", take),
            Rule("layers.{i}.mlp.up.bias", "c f", f"{_LAYER}.mlp.{name}.bias", "(c f)", take, biased),
        )
    ),
    Rule("layers.{i}.mlp.down.weight", "h f", f"{_LAYER}.mlp.down_proj.weight", "h f"),
    Rule("layers.{i}.mlp.down.bias", "h", f"{_LAYER}.mlp.down_proj.bias", "h", when=biased),
    Rule("final_norm.weight", "h", "model.norm.weight", "h"),
    Rule("head.weight", "v h", _HEAD, "v h", when=untied),
)


def plain_rope(config: Json) -> dict[str, Any]:
    """`config` with ``rope_theta`` on its own, where transformers 5 writes ``rope_parameters``.

    Raises:
        ValueError: the rotation is scaled, partial or otherwise not the plain one (Su et al. 2021).
    """
    out = dict(config)
    thetas = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    for field in ("rope_scaling", "rope_parameters"):
        nested = out.pop(field, None)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise ValueError(f"`{field}` must be an object, but is {nested!r:.80}")
        kind = nested.get("rope_type", nested.get("type", "default"))
        extra = {key: nested[key] for key in nested.keys() - {"rope_type", "type", "rope_theta"}}
        if extra.get("partial_rotary_factor") in (None, 1.0):
            extra.pop("partial_rotary_factor", None)
        if kind != "default" or extra:
            raise ValueError(
                f"`{field}` must be the default rotation, but is {nested!r:.200}; scaled rotations are not "
                f"supported"
            )
        if nested.get("rope_theta") is not None:
            thetas[field] = nested["rope_theta"]
    if len(set(map(repr, thetas.values()))) > 1:
        raise ValueError(f"`rope_theta` must be given once, but is given as {thetas}; leave the right one")
    if config.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(
            f"`partial_rotary_factor` must be 1, but is {config['partial_rotary_factor']!r:.40}; Llama "
            f"rotates whole heads"
        )
    out.pop("rope_theta", None)
    return {**out, "rope_theta": next(iter(thetas.values()))} if thetas else out


def with_rope_parameters(config: Json) -> dict[str, Any]:
    """`config` with the base of the rotation in both places: versions 4 and 5 of transformers differ."""
    return {**config, "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    prefix="model.",
    rules=RULES,
    tied=(_HEAD, _WORDS),
    ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",),
    settings=(
        Setting("num_hidden_layers", "num_layers", 32),
        Setting("hidden_size", "hidden_size", 4096),
        Setting("num_attention_heads", "num_attention_heads", 32),
        Setting("num_key_value_heads", "num_query_groups", None, int, resolved="kv_heads"),
        Setting("head_dim", "kv_channels", None, int, resolved="head_dim"),
        Setting("intermediate_size", "ffn_hidden_size", 11008, resolved="ffn_size"),
        Setting("max_position_embeddings", "max_position_embeddings", 2048, resolved="positions"),
        Setting("hidden_act", "activation", "silu", words=(("silu", "swiglu"), ("swish", "swiglu"))),
        Setting("attention_bias", "add_bias_linear", False),
        Setting("mlp_bias", "add_bias_linear", False),
        Setting("rms_norm_eps", "norm_epsilon", 1e-6),
        Setting("rope_theta", "rotary_base", 10000.0),
        Setting("attention_dropout", "attention_dropout", 0.0),
        Setting("initializer_range", "init_method_std", 0.02),
        Setting(
            "tie_word_embeddings",
            "untie_embeddings_and_output_weights",
            False,
            words=((True, False), (False, True)),
        ),
    ),
    ours_fixed=(
        ("position_embedding_type", "rope"),
        ("rotary_percent", 1.0),
        ("normalization", "RMSNorm"),
        ("apply_residual_connection_post_layernorm", False),
    ),
    training=(("hidden_dropout", 0.0),),
    limits=(
        *COMMON_LIMITS,
        Limit(lambda m: m.head_dim % 2 == 0, "the width of a head must be even to be rotated"),
    ),
    plain=plain_rope,
    complete=with_rope_parameters,
)
