"""SmolLM3 (Hugging Face 2025) as transformers' SmolLM3ForCausalLM: Llama with some layers without RoPE."""

from __future__ import annotations

from dataclasses import replace

from megazero.formats.hf.architecture import PLAIN_HEADS, FieldPair, Json, JsonObject, layers_of
from megazero.formats.hf.llama import LLAMA, with_defaults, without
from megazero.formats.hf.rope import plain_rope
from megazero.formats.hf.windows import KINDS

_LAYERS, _ROTATED, _INTERVAL = 36, "no_rope_layers", "no_rope_layer_interval"


def _plain(config: Json) -> JsonObject:
    """Flatten the rope fields, and list the layers.

    Despite its name, ``no_rope_layers`` has a 1 for layers with RoPE; `no_rope_freq` has a 1 for those
    without.
    """
    out = {"rope_theta": 2_000_000.0, **plain_rope(config)}
    layers = layers_of(out, _LAYERS)
    rotated, interval = out.pop(_ROTATED, None), out.pop(_INTERVAL, 4)
    if rotated is None:
        if type(interval) is not int or interval < 1:
            raise ValueError(f"`{_INTERVAL}` must be a positive number, but is {interval!r:.40}")
        rotated = [int(number % interval > 0) for number in range(1, layers + 1)]
    if not isinstance(rotated, list) or len(rotated) < layers or not {*map(str, rotated)} <= {"0", "1"}:
        raise ValueError(f"`{_ROTATED}` must be 0 or 1 for each of {layers} layers, but is {rotated!r:.200}")
    if not any(rotated[:layers]):
        raise ValueError(f"`{_ROTATED}` must let some layer rotate, but has 0 for all")
    kinds = out.pop(KINDS, None)
    if kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} != {"full_attention"}):
        raise ValueError(f"`{KINDS}` must be full_attention for all layers, but is {kinds!r:.200}")
    return {**out, _ROTATED: tuple(1 - flag for flag in rotated[:layers])}


def _complete(config: Json) -> JsonObject:
    out = LLAMA.complete(config)
    return {**out, _ROTATED: [1 - flag for flag in out[_ROTATED]]}


SMOLLM3 = replace(
    LLAMA,
    name="SmolLM3ForCausalLM",
    model_type="smollm3",
    settings=(
        *with_defaults(
            without(LLAMA.settings, "head_dim"),
            num_hidden_layers=_LAYERS,
            hidden_size=2048,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
        FieldPair(
            _ROTATED, "no_rope_freq", None, tuple, resolved=lambda m: m.unrotated or (0,) * m.num_layers
        ),
    ),
    limits=(*LLAMA.limits, PLAIN_HEADS),
    plain=_plain,
    complete=_complete,
)
