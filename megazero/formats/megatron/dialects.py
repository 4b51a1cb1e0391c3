"""Translates the tensor names of all generations of Megatron into Megatron-Core's.

Megatron-LM before Core, Megatron-DeepSpeed, and Core with Transformer Engine or without have different names
for the same tensors. The common form is that of Core's layers without Transformer Engine, in which the only
stack of layers is called decoder. A layer for multi-token prediction is in a block, ``mtp.layers.0``, with
the norms and the projection of its inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

Arguments = Mapping[str, object]
"""Megatron's arguments, by name."""

ModelFields = dict[str, Any]
"""Fields of `ModelConfig`, by name."""

UNSET = (None, False, "", ())
"""The values of an argument that was not given."""

WORD = "embedding.word_embeddings.weight"
WORD_COPY = "word_embeddings_for_further_tokens.weight"
"""The last stage's copy of the embedding, for multi-token prediction; the name is megazero's own."""
HEAD = "output_layer.weight"
HEAD_COPY = "word_embeddings_for_head.weight"
"""The last stage's copy of the embedding, for a tied head."""
BLOCK = "mtp.layers."
"""The beginning of the names in blocks for multi-token prediction."""
LAYER = r"(?:decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\."

_MODULES = re.compile(r"^(?:module\.)+")

# Applied in this order, each to the result of the one before.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (_MODULES, ""),
        # Core's BERT has an encoder as its only stack.
        (r"^encoder\.", "decoder."),
        (r"^(mtp\.layers\.\d+\.)mtp_model_layer\.", r"\1transformer_layer."),
        # Megatron-LM before Core and Megatron-DeepSpeed call the decoder encoder or transformer.
        (r"^language_model\.(?:encoder|transformer)\.", "decoder."),
        (r"^language_model\.(embedding|output_layer|rotary_pos_emb|pooler)\.", r"\1."),
        (r"^language_model\.lm_head\.", "output_layer."),
        # BERT's output bias: in Core it is in `output_layer`, before Core in the masked-LM head.
        (r"^lm_head\.bias$", "output_layer.bias"),
        (r"^lm_head\.layernorm\.", "lm_head.layer_norm."),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
        (rf"^({LAYER})input_norm\.", r"\1input_layernorm."),
        (rf"^({LAYER})attention\.", r"\1self_attention."),
        (rf"^({LAYER})self_attention\.query_key_value\.", r"\1self_attention.linear_qkv."),
        (rf"^({LAYER})self_attention\.dense\.", r"\1self_attention.linear_proj."),
        (rf"^({LAYER})post_attention_(?:layer)?norm\.", r"\1pre_mlp_layernorm."),
        (rf"^({LAYER})mlp\.dense_h_to_4h\.", r"\1mlp.linear_fc1."),
        (rf"^({LAYER})mlp\.dense_4h_to_h\.", r"\1mlp.linear_fc2."),
        # Transformer Engine fuses a norm into the linear layer behind it.
        (rf"^({LAYER})self_attention\.linear_qkv\.layer_norm_", r"\1input_layernorm."),
        (rf"^({LAYER})mlp\.linear_fc1\.layer_norm_", r"\1pre_mlp_layernorm."),
        (rf"^({LAYER})mixer\.in_proj\.layer_norm_", r"\1norm."),
        (
            rf"^({LAYER})self_attention\.linear_(q|kv)_up_proj\.layer_norm_",
            r"\1self_attention.\2_layernorm.",
        ),
    )
)
_NOT_WEIGHTS = re.compile(r"(?:.*\.)?(?:_extra_state|inv_freq|local_tokens_per_expert)")
EXPERT = re.compile(r"(.*mlp\.experts\.local_experts\.)(\d+)\.(.*)")
"""The name of one expert's tensor, in three groups: the prefix, the number, and the rest."""
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.")

# (pattern of names, kind of model that has them), for models that are not supported; the first match counts.
_FOREIGN = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"experts?\b|\.router\.|\.gate\.wg\.|moe", "mixture of experts other than the arguments say"),
        (r"retro|retriever|chunked_cross|neighbor", "RETRO"),
        (
            r"inter_attention|cross_attention|cross_attn|^language_model\.decoder\.|^encoder\.",
            "encoder-decoder",
        ),
        (r"tokentype_embeddings|pooler|binary_head|^lm_head\.", "heads that its kind does not have"),
        (r"vision|image|patch", "vision"),
        (r"^mtp\.", "multi-token prediction"),
        (r"mixer\.|mamba", "state-space"),
        (r"[qk]_(?:layer)?norm|linear_q_|linear_kv_|linear_qkv", "another attention"),
    )
)


def core_name(name: str, two_stacks: bool = False) -> str | None:
    """Core's name of a tensor, with the layer's number within the stage; None for non-weights.

    A model's only stack of layers is called decoder; with `two_stacks`, each keeps its name.
    """
    if _NOT_WEIGHTS.fullmatch(name):
        return None
    plain = _MODULES.sub("", name)
    if two_stacks and plain.startswith("encoder."):
        return plain
    for pattern, other in _RENAMED:
        name = pattern.sub(other, name)
    return name


def has_two_stacks(names: Collection[str]) -> bool:
    """Whether names of tensors in files are those of an encoder-decoder."""
    plain = [_MODULES.sub("", name) for name in names]
    return all(any(name.startswith(f"{stack}.") for name in plain) for stack in ("encoder", "decoder"))


def layer_of(name: str) -> int | None:
    """The number of the layer in a tensor's name; None outside the layers."""
    match = _NUMBERED.match(name)
    return None if match is None else int(match[1])


def moved(name: str, by: int) -> str:
    """The name with the number of its layer raised by `by`."""
    return renumbered(name, lambda number: f"decoder.layers.{number + by}.")


def renumbered(name: str, place: Callable[[int], str]) -> str:
    """The name with ``decoder.layers.N.`` replaced by `place(N)`."""
    return _NUMBERED.sub(lambda match: place(int(match[1])), name)


def prefix_of_layer_file(names: Iterable[str]) -> str:
    """The prefix, in a whole model, of the names in a file of one module of DeepSpeed's pipeline."""
    names = set(names)
    if "word_embeddings.weight" in names:
        return "language_model.embedding."
    if any("attention." in name for name in names):
        return "language_model.encoder.layers.0."
    if names and names <= {"weight", "bias"}:
        return "language_model.encoder.final_layernorm."
    return "language_model."


def foreign_kind(names: Iterable[str]) -> str | None:
    """The kind of unsupported model that these unknown names belong to, or None."""
    names = list(names)
    return next((kind for pattern, kind in _FOREIGN if any(pattern.search(name) for name in names)), None)
