"""GPT-NeoX and Falcon (Black et al. 2022, Almazrouei et al. 2023) as transformers' classes for causal LM.

Attention and MLP run in parallel: both read the layer's input, each through a norm of its own. Queries, keys
and values lie head by head, or group by group, as megazero's do. Of Falcon only the newer decoder is
supported, with two norms in a layer (40B); the older one has a single norm (7B).
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import TensorRule, untied
from megazero.formats.hf.architecture import (
    DENSE_LIMITS,
    GELUS,
    PLAIN_HEADS,
    TIED,
    Architecture,
    FieldPair,
    Json,
    JsonObject,
    Limit,
    pair,
    without_own_code,
)
from megazero.formats.hf.llama import LLAMA
from megazero.formats.hf.rope import ROPE_SETTINGS, plain_rope, with_rope_parameters
from megazero.formats.hf.windows import NO_WINDOWS

_BASE = ("rotary_emb_base", "rope_theta")
SHARE, PARTIAL = "rotary_pct", "partial_rotary_factor"
_NEWER, _NORMS = "new_decoder_architecture", "num_ln_in_parallel_attn"
SCALINGS = ("rope_parameters", "rope_scaling")


def _rules(prefix: str, layers: str, names: dict[str, str], head: str) -> tuple[TensorRule, ...]:
    """The rules for both architectures, by the names of their modules."""
    layer, attention = f"{prefix}{layers}.{{i}}", names["attention"]
    return (
        TensorRule("embedding.word.weight", "v h", f"{prefix}{names['words']}.weight", "v h"),
        *pair("layers.{i}.input_norm", f"{layer}.{names['input_norm']}"),
        *pair("layers.{i}.mlp_norm", f"{layer}.{names['mlp_norm']}"),
        *pair("layers.{i}.attention.qkv", f"{layer}.{attention}.query_key_value", "g s d h", "(g s d) h"),
        *pair("layers.{i}.attention.out", f"{layer}.{attention}.dense", "h a"),
        *pair("layers.{i}.mlp.up", f"{layer}.mlp.dense_h_to_4h", "f h"),
        *pair("layers.{i}.mlp.down", f"{layer}.mlp.dense_4h_to_h", "h f"),
        *pair("final_norm", f"{prefix}{names['final_norm']}"),
        TensorRule("head.weight", "v h", f"{head}.weight", "v h", when=untied),
    )


def rotated(config: Json, share: float) -> JsonObject:
    """Flatten the rope fields where a head rotates a part of its channels, as version 4 or 5 spells them.

    Args:
        config: the fields of ``config.json``.
        share: the part of the channels that transformers assumes.

    Raises:
        ValueError: see `plain_rope`; or two fields give different parts.
    """
    out = dict(config)
    base = out.pop(_BASE[0], None)
    shares = [out.pop(name) for name in (SHARE, PARTIAL) if out.get(name) is not None]
    for field in SCALINGS:
        if isinstance(out.get(field), dict):
            nested = out[field] = dict(out[field])
            shares += [nested.pop(PARTIAL)] if nested.get(PARTIAL) is not None else []
            base = nested.pop(_BASE[1], base)
    if any(other != shares[0] for other in shares):
        raise ValueError(f"`{SHARE}` must be given once, but is given as {shares}; keep the right one")
    out = {**out, **({} if base is None else {_BASE[1]: base})}
    return {**plain_rope(out), SHARE: float((shares or [share])[0])}


def _plain_falcon(config: Json) -> JsonObject:
    """Flatten the rope fields, and fill in the number of norms."""
    out = plain_rope(without_own_code(config))
    if not out.get(_NEWER, False):
        raise ValueError(
            f"`{_NEWER}` must be true, but is not; the older decoder, with one norm, is not supported"
        )
    return {**out, _NORMS: 2 if out.get(_NORMS) is None else out[_NORMS]}


def _complete_neox(config: Json) -> JsonObject:
    out = with_rope_parameters(config)
    base, share = out[_BASE[1]], out[SHARE]
    if "rope_scaling" in out:  # version 5 then reads the base only there
        out["rope_scaling"] = {**out["rope_scaling"], _BASE[1]: base}
    return {**out, _BASE[0]: base, SCALINGS[0]: {**out[SCALINGS[0]], PARTIAL: share}}


EVEN_SHARE = Limit(lambda m: m.rotary_dim % 2 == 0, "a head must have an even number of rotated channels")

_OURS_FIXED = (
    ("family", "gpt"),
    ("normalization", "LayerNorm"),
    ("apply_residual_connection_post_layernorm", False),
)

GPT_NEOX = Architecture(
    name="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    auto="AutoModelForCausalLM",
    prefix="gpt_neox.",
    rules=_rules(
        "gpt_neox.",
        "layers",
        {
            "words": "embed_in",
            "input_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "attention": "attention",
            "final_norm": "final_layer_norm",
        },
        "embed_out",
    ),
    copies=(("embed_out.weight", "gpt_neox.embed_in.weight"),),
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    settings=(
        FieldPair("num_hidden_layers", "num_layers", 44),
        FieldPair("hidden_size", "hidden_size", 6144),
        FieldPair("num_attention_heads", "num_attention_heads", 64),
        FieldPair("intermediate_size", "ffn_hidden_size", 24576, resolved="ffn_size"),
        FieldPair("max_position_embeddings", "max_position_embeddings", 2048, resolved="positions"),
        FieldPair("hidden_act", "activation", "gelu", words=GELUS),
        FieldPair("layer_norm_eps", "norm_epsilon", 1e-5),
        *ROPE_SETTINGS,
        FieldPair(SHARE, "rotary_percent", 0.25),
        FieldPair("hidden_dropout", "hidden_dropout", 0.0),
        FieldPair("attention_dropout", "attention_dropout", 0.0),
        FieldPair("initializer_range", "init_method_std", 0.02),
        FieldPair("use_parallel_residual", "use_parallel_residual", True),
        TIED,
    ),
    fixed=(("attention_bias", True),),
    ours_fixed=(*_OURS_FIXED, ("add_bias_linear", True)),
    limits=(
        *DENSE_LIMITS,
        NO_WINDOWS,
        PLAIN_HEADS,
        EVEN_SHARE,
        Limit(lambda m: m.kv_heads == m.num_attention_heads, "there must be no groups of query heads"),
    ),
    plain=lambda config: rotated(config, 0.25),
    complete=_complete_neox,
)

FALCON = Architecture(
    name="FalconForCausalLM",
    model_type="falcon",
    auto="AutoModelForCausalLM",
    prefix="transformer.",
    rules=_rules(
        "transformer.",
        "h",
        {
            "words": "word_embeddings",
            "input_norm": "ln_attn",
            "mlp_norm": "ln_mlp",
            "attention": "self_attention",
            "final_norm": "ln_f",
        },
        "lm_head",
    ),
    copies=(("lm_head.weight", "transformer.word_embeddings.weight"),),
    ignored=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    settings=(
        FieldPair("num_hidden_layers", "num_layers", 32),
        FieldPair("hidden_size", "hidden_size", 4544),
        FieldPair("num_attention_heads", "num_attention_heads", 71),
        FieldPair("num_kv_heads", "num_query_groups", None, int, resolved="kv_heads"),
        FieldPair("ffn_hidden_size", "ffn_hidden_size", None, int, resolved="ffn_size"),
        FieldPair("max_position_embeddings", "max_position_embeddings", 2048, resolved="positions"),
        FieldPair("activation", "activation", "gelu", words=GELUS),
        FieldPair("layer_norm_epsilon", "norm_epsilon", 1e-5),
        *ROPE_SETTINGS,
        FieldPair("bias", "add_bias_linear", False),
        FieldPair("hidden_dropout", "hidden_dropout", 0.0),
        FieldPair("attention_dropout", "attention_dropout", 0.0),
        FieldPair("initializer_range", "init_method_std", 0.02),
        replace(TIED, default=True),
    ),
    fixed=(("alibi", False), (_NEWER, True), ("parallel_attn", True), (_NORMS, 2)),
    ours_fixed=(*_OURS_FIXED, ("rotary_percent", 1.0), ("use_parallel_residual", True)),
    limits=(*LLAMA.limits, PLAIN_HEADS),
    plain=_plain_falcon,
    complete=with_rope_parameters,
)
