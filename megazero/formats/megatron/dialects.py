"""Names of Megatron's tensors in all its generations, made into those of Megatron-Core's plain layers.

A model's only stack of layers is a decoder's there. A layer that predicts a further token stands in a block
of its own, ``mtp.layers.0``, beside the norms and the product that join what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

WORD = "embedding.word_embeddings.weight"
WORD_COPY = "word_embeddings_for_further_tokens.weight"
"""What the embedding is called here that the last stage has, to predict further tokens."""
HEAD = "output_layer.weight"
HEAD_COPY = "word_embeddings_for_head.weight"
BLOCK = "mtp.layers."
"""What the names of blocks that predict further tokens begin with."""
LAYER = r"(?:decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\."

_MODULES = re.compile(r"^(?:module\.)+")

# Applied one after another, each to what the previous one made of the name.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (_MODULES, ""),
        # Core's BERT is an encoder, and has no other stack.
        (r"^encoder\.", "decoder."),
        (r"^(mtp\.layers\.\d+\.)mtp_model_layer\.", r"\1transformer_layer."),
        # Megatron-LM before Core and Megatron-DeepSpeed call the decoder encoder or transformer.
        (r"^language_model\.(?:encoder|transformer)\.", "decoder."),
        (r"^language_model\.(embedding|output_layer|rotary_pos_emb|pooler)\.", r"\1."),
        (r"^language_model\.lm_head\.", "output_layer."),
        # A masked-LM head's last part is called by its own name where the head does not contain it.
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
        # Transformer Engine keeps a norm with the linear layer after it.
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
"""The name of one expert's tensor: what is before its number, the number, and what is after it."""
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.")

# Names that show a model that we do not support; the first match says which kind.
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
    """Core's name for a tensor, its layer still numbered as in the stage; None for what is not a weight.

    A model's only stack of layers is called the decoder; of two, each keeps its name in Core.
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
    """Whether a model with tensors of these names, as they are in the files, is an encoder and a decoder."""
    plain = [_MODULES.sub("", name) for name in names]
    return all(any(name.startswith(f"{stack}.") for name in plain) for stack in ("encoder", "decoder"))


def layer_of(name: str) -> int | None:
    """The layer number in a tensor's name, if it belongs to a layer."""
    match = _NUMBERED.match(name)
    return None if match is None else int(match[1])


def moved(name: str, by: int) -> str:
    """The name with its layer's number raised by `by`."""
    return renumbered(name, lambda number: f"decoder.layers.{number + by}.")


def renumbered(name: str, place: Callable[[int], str]) -> str:
    """The name with another place of its layer, which is made of its number."""
    return _NUMBERED.sub(lambda match: place(int(match[1])), name)


def prefix_of_layer_file(names: Iterable[str]) -> str:
    """The prefix that names in the file of one module of DeepSpeed's pipeline have in a whole model."""
    names = set(names)
    if "word_embeddings.weight" in names:
        return "language_model.embedding."
    if any("attention." in name for name in names):
        return "language_model.encoder.layers.0."
    if names and names <= {"weight", "bias"}:
        return "language_model.encoder.final_layernorm."
    return "language_model."


def foreign_kind(names: Iterable[str]) -> str | None:
    """The kind of model that has these names, none of which is in the table."""
    names = list(names)
    return next((kind for pattern, kind in _FOREIGN if any(pattern.search(name) for name in names)), None)
