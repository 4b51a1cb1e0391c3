"""Apertus (Swiss AI 2025) as transformers' ApertusForCausalLM: Llama with xIELU and norms of each head.

Of xIELU's numbers theirs has two as buffers, which are constants here.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from megazero.checkpoint.naming import TensorRule
from megazero.formats.hf.architecture import DENSE_LIMITS, Constant, FieldPair, Json, pair
from megazero.formats.hf.llama import (
    EVEN_HEADS,
    HEAD_NORMS,
    LAYER,
    LLAMA,
    UNBIASED_SETTINGS,
    layer_norms,
    rules_with,
    with_defaults,
    without,
)
from megazero.formats.hf.qwen import HEADS_NORMED
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import NO_WINDOWS

_OURS, _THEIRS = "layers.{i}.mlp.activation", f"{LAYER}.mlp.act_fn"
_MLP = (
    pair("layers.{i}.mlp.up", f"{LAYER}.mlp.up_proj", "f h")[0],
    pair("layers.{i}.mlp.down", f"{LAYER}.mlp.down_proj", "h f")[0],
    *(TensorRule(f"{_OURS}.{name}", "1", f"{_THEIRS}.{name}", "1") for name in ("alpha_p", "alpha_n")),
)
_CONSTANTS = tuple(
    Constant(TensorRule(f"{_OURS}.{name}", "", f"{_THEIRS}.{name}", ""), number)
    for name, number in (("beta", 0.5), ("eps", -1e-6))
)
_ROTATION = MappingProxyType(
    {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    }
)
"""The scaling that transformers assumes of a ``config.json`` that says nothing of it."""


def _plain(config: Json) -> dict[str, object]:
    """`config` with a flat rotation; raises ValueError as `plain_rope` does."""
    scaled = any(config.get(field) is not None for field in ("rope_scaling", "rope_parameters"))
    return plain_rope(config if scaled else {**config, "rope_parameters": dict(_ROTATION)})


APERTUS = replace(
    LLAMA,
    name="ApertusForCausalLM",
    model_type="apertus",
    rules=(
        *rules_with(_MLP, layer_norms(input_norm="attention_layernorm", mlp_norm="feedforward_layernorm")),
        *HEAD_NORMS,
    ),
    blank=_CONSTANTS,
    settings=(
        *with_defaults(
            without(UNBIASED_SETTINGS, "hidden_act"),
            rope_theta=12_000_000.0,
            intermediate_size=14336,
            max_position_embeddings=65536,
            rms_norm_eps=1e-5,
        ),
        FieldPair("hidden_act", "activation", "xielu", words=(("xielu", "xielu"),)),
    ),
    fixed=(("attention_bias", False),),
    ours_fixed=(*LLAMA.ours_fixed, ("add_bias_linear", False), *HEADS_NORMED),
    limits=(*DENSE_LIMITS, NO_WINDOWS, EVEN_HEADS),
    plain=_plain,
)
