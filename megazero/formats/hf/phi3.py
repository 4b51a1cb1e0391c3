"""Phi-3 (Abdin et al. 2024) as transformers' Phi3ForCausalLM: Llama with fused matrices.

`qkv_proj` has all queries above all keys above all values; `gate_up_proj` the gates above the values.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.naming import TensorRule
from megazero.formats.hf.architecture import (
    DENSE_LIMITS,
    PLAIN_HEADS,
    FieldPair,
    Limit,
    without_own_code,
)
from megazero.formats.hf.llama import (
    EVEN_HEADS,
    LAYER,
    LLAMA,
    UNBIASED_SETTINGS,
    rules_with,
    with_defaults,
)
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import ALIKE, WINDOW

PHI3 = replace(
    LLAMA,
    name="Phi3ForCausalLM",
    model_type="phi3",
    rules=rules_with(
        (
            TensorRule("layers.{i}.mlp.up.weight", "2 f h", f"{LAYER}.mlp.gate_up_proj.weight", "(2 f) h"),
            TensorRule("layers.{i}.mlp.down.weight", "h f", f"{LAYER}.mlp.down_proj.weight", "h f"),
        )
    ),
    fused=(
        (
            f"{LAYER}.self_attn.qkv_proj.weight",
            tuple(f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkv"),
        ),
    ),
    settings=(
        *with_defaults(
            UNBIASED_SETTINGS,
            hidden_size=3072,
            intermediate_size=8192,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        FieldPair("resid_pdrop", "hidden_dropout", 0.0),
        FieldPair("embd_pdrop", "hidden_dropout", 0.0),
        WINDOW,
    ),
    ours_fixed=(*LLAMA.ours_fixed, ("add_bias_linear", False), ("add_qkv_bias", False)),
    implied=(),
    limits=(
        *DENSE_LIMITS,
        EVEN_HEADS,
        PLAIN_HEADS,
        ALIKE,
        Limit(
            lambda m: (
                m.position_embedding_type == "rope"
                and not m.use_rope_scaling
                and m.rotary_seq_len_interpolation_factor is None
            ),
            "rotary positions must not be scaled",
        ),
    ),
    plain=lambda config: plain_rope(without_own_code(config)),
)
