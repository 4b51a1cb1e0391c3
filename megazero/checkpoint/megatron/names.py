"""The names of Megatron's tensors, and how ours are made from them.

Each generation has names of its own. `core_name` turns all of them into those of Megatron-Core's plain
layers, which are a decoder's; one table says which parts of ours those are, and along which of our dims
tensor-parallel ranks split them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megazero.checkpoint.box import Box
from megazero.checkpoint.megatron.masked import with_binary_head, with_masked_head, with_types
from megazero.checkpoint.naming import (
    Link,
    Table,
    TensorRule,
    always,
    biased,
    qkv_biased,
    untied,
    with_experts,
    with_shared_experts,
    without_experts,
)
from megazero.checkpoint.part import ROUTER, WEIGHT, Key
from megazero.config.tree.model import ModelConfig

WORD = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
HEAD_COPY = "word_embeddings_for_head.weight"
VERSIONS = (0.0, 1.0, 2.0, 3.0)
_LAYER = r"decoder\.layers\.(\d+)\."

_MODULES = re.compile(r"^(?:module\.)+")

# Applied one after another, each to what the previous one made of the name.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (_MODULES, ""),
        # Core's BERT is an encoder, and has no other stack.
        (r"^encoder\.", "decoder."),
        # Megatron-LM before Core and Megatron-DeepSpeed call the decoder encoder or transformer.
        (r"^language_model\.(?:encoder|transformer)\.", "decoder."),
        (r"^language_model\.(embedding|output_layer|rotary_pos_emb|pooler)\.", r"\1."),
        (r"^language_model\.lm_head\.", "output_layer."),
        # A masked-LM head's last part is called by its own name where the head does not contain it.
        (r"^lm_head\.bias$", "output_layer.bias"),
        (r"^lm_head\.layernorm\.", "lm_head.layer_norm."),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
        (rf"^({_LAYER})input_norm\.", r"\1input_layernorm."),
        (rf"^({_LAYER})attention\.", r"\1self_attention."),
        (rf"^({_LAYER})self_attention\.query_key_value\.", r"\1self_attention.linear_qkv."),
        (rf"^({_LAYER})self_attention\.dense\.", r"\1self_attention.linear_proj."),
        (rf"^({_LAYER})post_attention_(?:layer)?norm\.", r"\1pre_mlp_layernorm."),
        (rf"^({_LAYER})mlp\.dense_h_to_4h\.", r"\1mlp.linear_fc1."),
        (rf"^({_LAYER})mlp\.dense_4h_to_h\.", r"\1mlp.linear_fc2."),
        # Transformer Engine keeps a norm with the linear layer after it.
        (rf"^({_LAYER})self_attention\.linear_qkv\.layer_norm_", r"\1input_layernorm."),
        (rf"^({_LAYER})mlp\.linear_fc1\.layer_norm_", r"\1pre_mlp_layernorm."),
    )
)
_NOT_WEIGHTS = re.compile(r"(?:.*\.)?(?:_extra_state|inv_freq|local_tokens_per_expert)")
EXPERT = re.compile(r"(.*mlp\.experts\.local_experts\.)(\d+)\.(.*)")
"""The name of one expert's tensor: what is before its number, the number, and what is after it."""
_NUMBERED = re.compile(_LAYER)

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
        (r"[qk]_(?:layer)?norm|linear_q_|linear_kv_", "another attention"),
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
    return _NUMBERED.sub(lambda match: f"decoder.layers.{int(match[1]) + by}.", name)


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


@dataclass(frozen=True)
class Sliced:
    """A rule, the letter of the dim that tensor-parallel ranks split (None if each holds all), and our kind.

    A vocabulary (letter v) is padded at its end; only the number of its rows in the files says by how much.
    """

    rule: TensorRule
    letter: str | None = None
    kind: str = WEIGHT

    def boxes(self, link: Link, ranks: int, rows: int) -> Iterator[Box]:
        """The part of our tensor that each rank holds; `rows` is the first dim of its tensor."""
        if self.letter is None:
            yield from [link.box] * ranks
            return
        dim = self.rule.dims.split().index(self.letter)
        size = link.shape[dim]
        step = rows if self.letter == "v" else size // ranks
        for rank in range(ranks):
            start, stop = min(size, rank * step), min(size, (rank + 1) * step)
            offset = tuple(start if d == dim else o for d, o in enumerate(link.box.offset))
            shape = tuple(stop - start if d == dim else n for d, n in enumerate(link.box.shape))
            yield Box(offset, shape)

    def shape(self, link: Link, ranks: int) -> tuple[int, ...] | None:
        """The shape of one rank's tensor, None if the dim does not divide; a vocabulary's is the whole."""
        if self.letter is None or self.letter == "v":
            return link.their_shape
        dim = self.rule.dims.split().index(self.letter)
        if link.shape[dim] % ranks:
            return None
        box = next(self.boxes(link, ranks, 0))
        return replace(link, box=box).their_shape


def _with_layer_norm(model: ModelConfig) -> bool:
    return model.normalization == "LayerNorm"


def _gated(model: ModelConfig) -> bool:
    return model.gated


def _plain(model: ModelConfig) -> bool:
    return not _gated(model)


def _gated_biased(model: ModelConfig) -> bool:
    return _gated(model) and model.add_bias_linear


def _plain_biased(model: ModelConfig) -> bool:
    return _plain(model) and model.add_bias_linear


def _with_normed_words(model: ModelConfig) -> bool:
    return model.embed_layernorm


def _with_offset(model: ModelConfig) -> bool:
    return model.softmax_type == "learnable"


def _with_normed_heads(model: ModelConfig) -> bool:
    return model.qk_layernorm


def _with_positions(model: ModelConfig) -> bool:
    return model.position_embedding_type == "learned_absolute"


def _with_shared_gate(model: ModelConfig) -> bool:
    return model.moe_shared_expert_gate


def _balanced_by_bias(model: ModelConfig) -> bool:
    return model.moe_router_enable_expert_bias


def _mlp_rows() -> Iterator[Sliced]:
    """Three kinds of MLP: a dense layer's, a layer's experts, and those that all tokens go through."""
    core, conditions = "decoder.layers.{i}.mlp", (_gated, _gated_biased, _plain, _plain_biased)
    kinds = (
        ("mlp", "", "f", core, without_experts),
        ("mlp.experts", "x ", "m", f"{core}.experts.local_experts.{{x}}", with_experts),
        ("mlp.shared", "", "w", f"{core}.shared_experts", with_shared_experts),
    )
    for ours, expert, letter, theirs, layer in kinds:
        merged = f"({expert}c {letter})", f"({expert}{letter})"
        tables = (
            *(("up", "weight", f"{expert}c {letter} h", "linear_fc1.weight", f"{merged[0]} h", letter, 0),),
            *(("up", "bias", f"{expert}c {letter}", "linear_fc1.bias", merged[0], letter, 1),),
            *(("up", "weight", f"{expert}{letter} h", "linear_fc1.weight", f"{merged[1]} h", letter, 2),),
            *(("up", "bias", f"{expert}{letter}", "linear_fc1.bias", merged[1], letter, 3),),
            *(
                (
                    "down",
                    "weight",
                    f"{expert}h {letter}",
                    "linear_fc2.weight",
                    f"({expert}h) {letter}",
                    letter,
                    None,
                ),
            ),
            *(("down", "bias", f"{expert}h", "linear_fc2.bias", f"({expert}h)", None, None),),
        )
        for which, suffix, dims, name, their_dims, cut, condition in tables:
            when = biased if suffix == "bias" and condition is None else always
            when = when if condition is None else conditions[condition]
            rule = TensorRule(
                f"layers.{{i}}.{ours}.{which}.{suffix}",
                dims,
                f"{theirs}.{name}",
                their_dims,
                None,
                when,
                layer,
            )
            yield Sliced(rule, cut)
    router = f"{core}.router"
    yield Sliced(
        TensorRule("layers.{i}.mlp.router.weight", "x h", f"{router}.weight", "x h", layer=with_experts)
    )
    yield Sliced(
        TensorRule(
            "layers.{i}.mlp.router.bias",
            "x",
            f"{router}.expert_bias",
            "x",
            None,
            _balanced_by_bias,
            with_experts,
        ),
        kind=ROUTER,
    )
    gate = "layers.{i}.mlp.shared_gate.weight", f"{core}.shared_experts.gate_weight"
    yield Sliced(TensorRule(gate[0], "u h", gate[1], "u h", None, _with_shared_gate, with_shared_experts))


def rules(checkpoint_version: float) -> tuple[Sliced, ...]:
    """The table. The order of a rank's queries, keys and values has changed twice.

    Args:
        checkpoint_version: 0 has all queries, then all keys, then all values; 1 has the three channel by
            channel; 2 and later have the queries, key and value head by head, or group by group.
    """
    qkv = {0.0: "(s g d)", 1.0: "(g d s)"}.get(checkpoint_version, "(g s d)")

    def row(
        ours: str,
        dims: str,
        theirs: str,
        their_dims: str | None = None,
        letter: str | None = None,
        when: Callable[[ModelConfig], bool] = always,
    ) -> Sliced:
        return Sliced(TensorRule(ours, dims, theirs, their_dims or dims, when=when), letter)

    def norm(
        ours: str, theirs: str, when: Callable[[ModelConfig], bool] = always, dim: str = "h"
    ) -> tuple[Sliced, Sliced]:
        return (
            row(f"{ours}.weight", dim, f"{theirs}.weight", when=when),
            row(f"{ours}.bias", dim, f"{theirs}.bias", when=lambda m: when(m) and _with_layer_norm(m)),
        )

    ours, core = "layers.{i}", "decoder.layers.{i}"
    attention = f"{core}.self_attention"
    softmax = f"{attention}.core_attention"
    return (
        row("embedding.word.weight", "v h", WORD, "v h", "v"),
        *norm("embedding.norm", "embedding.word_embeddings.norm", _with_normed_words),
        row(
            "embedding.position.weight",
            "p h",
            "embedding.position_embeddings.weight",
            "p h",
            when=_with_positions,
        ),
        row(
            "embedding.token_type.weight",
            "t h",
            "embedding.tokentype_embeddings.weight",
            when=with_types,
        ),
        *norm(f"{ours}.input_norm", f"{core}.input_layernorm"),
        row(f"{ours}.attention.qkv.weight", "g s d h", f"{attention}.linear_qkv.weight", f"{qkv} h", "g"),
        row(f"{ours}.attention.qkv.bias", "g s d", f"{attention}.linear_qkv.bias", qkv, "g", qkv_biased),
        row(f"{ours}.attention.out.weight", "h a", f"{attention}.linear_proj.weight", "h a", "a"),
        row(f"{ours}.attention.out.bias", "h", f"{attention}.linear_proj.bias", "h", when=biased),
        row(f"{ours}.attention.softmax_offset", "q", f"{softmax}.softmax_offset", "q", "q", _with_offset),
        *norm(f"{ours}.attention.q_norm", f"{attention}.q_layernorm", _with_normed_heads, "d"),
        *norm(f"{ours}.attention.k_norm", f"{attention}.k_layernorm", _with_normed_heads, "d"),
        *norm(f"{ours}.mlp_norm", f"{core}.pre_mlp_layernorm"),
        *_mlp_rows(),
        *norm("final_norm", "decoder.final_layernorm"),
        row("head.weight", "v h", HEAD, "v h", "v", untied),
        *(
            row(f"{ours}.{kind}", dims if kind == "weight" else dims[0], f"{theirs}.{kind}", when=when)
            for ours, dims, theirs, when in (
                ("head.dense", "h e", "lm_head.dense", with_masked_head),
                ("head.norm", "h", "lm_head.layer_norm", with_masked_head),
                ("pooler", "h e", "pooler.dense", with_binary_head),
                ("binary_head", "o h", "binary_head", with_binary_head),
            )
            for kind in ("weight", "bias")
        ),
        row("head.bias", "v", "output_layer.bias", letter="v", when=with_masked_head),
    )


def links_of(
    table: Iterable[Sliced], model: ModelConfig, vocab_size: int
) -> Mapping[str, tuple[Sliced, Link]]:
    """Core's name -> its rule and which part of ours it is, for a model of this shape."""
    return {
        name: (sliced, replace(link, key=Key(link.key.name, sliced.kind)))
        for sliced in table
        for name, link in Table.of([sliced.rule], model, vocab_size).by_theirs.items()
    }


def held_whole(name: str) -> bool:
    """Whether each tensor-parallel rank has all of a tensor with this (Core) name."""
    number = layer_of(name)
    template = name if number is None else name.replace(f"layers.{number}.", "layers.{i}.", 1)
    template = EXPERT.sub(r"\1{x}.\3", template)
    return any(sliced.rule.theirs == template and sliced.letter is None for sliced in rules(3.0))
