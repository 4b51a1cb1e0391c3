"""How our tensors are made from those of Megatron-Core's plain layers, and along which dims ranks split them.

`dialects.py` turns the names of all generations into Core's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from megazero.checkpoint.box import Box
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
from megazero.formats.megatron.dialects import BLOCK, EXPERT, HEAD, LAYER, WORD
from megazero.formats.megatron.hybrid import alone_in, in_layers, mixer_rules, with_both
from megazero.formats.megatron.latent import (
    further_name,
    further_norms,
    further_rows,
    latent_norms,
    latent_rows,
    with_latent,
)
from megazero.formats.megatron.masked import with_binary_head, with_masked_head, with_types

VERSIONS = (0.0, 1.0, 2.0, 3.0)
_IN_LAYER = re.compile(rf"^(?:{LAYER}|{re.escape(BLOCK)}\d+\.)")


@dataclass(frozen=True)
class Sliced:
    """A rule, the letter of the dim that tensor-parallel ranks split (None if each holds all), and our kind.

    A vocabulary (letter v) is padded at its end; only the number of its rows in the files says by how much.
    `either`: the dim that some implementations split, while in others each rank holds all.
    """

    rule: TensorRule
    letter: str | None = None
    kind: str = WEIGHT
    either: str | None = None

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

    def fitted(self, link: Link, shapes: tuple[tuple[int, ...], ...]) -> Sliced:
        """The same, split if the ranks' shapes say so, where there are both ways."""
        split = self.either is not None and len(shapes) > 1 and shapes[0] != link.their_shape
        return replace(self, letter=self.either) if split else self

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
    return model.qk_layernorm and not with_latent(model)


def _common(model: ModelConfig) -> bool:
    return not with_latent(model)


def _common_biased(model: ModelConfig) -> bool:
    return qkv_biased(model) and not with_latent(model)


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


def _latent_rows(norm: Callable[..., tuple[Sliced, Sliced]]) -> Iterator[Sliced]:
    ours, theirs = "layers.{i}.attention", "decoder.layers.{i}.self_attention"
    for name, dims, called, their_dims, letter, when in latent_rows():
        rule = TensorRule(f"{ours}.{name}.weight", dims, f"{theirs}.{called}.weight", their_dims, when=when)
        # Transformer Engine's projections down are whole on each rank, those of Core's own layers are split.
        yield Sliced(rule, letter, either=None if letter else dims[0])
    for name, called, dim, when in latent_norms():
        yield from norm(f"{ours}.{name}", f"{theirs}.{called}", when, dim)


def _hybrid_rows(norm: Callable[..., tuple[Sliced, Sliced]]) -> Iterator[Sliced]:
    """The tensors of layers that are a mixer, and the only norms of those and of MLPs alone."""
    for theirs, letters in (("pre_mlp_layernorm", "-E"), ("norm", "M")):
        for sliced in norm("layers.{i}.input_norm", f"decoder.layers.{{i}}.{theirs}"):
            yield replace(sliced, rule=replace(sliced.rule, layer=alone_in(letters)))
    for rule, letter in mixer_rules("decoder.layers.{i}.mixer"):
        yield Sliced(rule, letter)


def _further() -> Iterator[Sliced]:
    """The tensors of blocks that predict further tokens, beside those of their layers."""
    ours, theirs = "layers.{i}", "decoder.layers.{i}"
    for name, dims, called, their_dims, letter in further_rows():
        yield Sliced(TensorRule(f"{ours}.{name}", dims, f"{theirs}.{called}", their_dims), letter)
    for name, called in further_norms():
        for kind, when in (("weight", always), ("bias", _with_layer_norm)):
            rule = TensorRule(f"{ours}.{name}.{kind}", "h", f"{theirs}.{called}.{kind}", "h", when=when)
            yield Sliced(rule)


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
    plain = (
        row("embedding.word.weight", "v h", WORD, "v h", "v"),
        *norm("embedding.norm", "embedding.word_embeddings.norm", _with_normed_words),
        row("embedding.position.weight", "p h", "embedding.position_embeddings.weight", when=_with_positions),
        row("embedding.token_type.weight", "t h", "embedding.tokentype_embeddings.weight", when=with_types),
        *norm(f"{ours}.input_norm", f"{core}.input_layernorm"),
        *(
            row(
                f"{ours}.attention.qkv.{kind}",
                f"g s d{h}",
                f"{attention}.linear_qkv.{kind}",
                qkv + h,
                "g",
                when,
            )
            for kind, h, when in (("weight", " h", _common), ("bias", "", _common_biased))
        ),
        *_latent_rows(norm),
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
    return (
        *map(_of_parts, plain),
        *_hybrid_rows(norm),
    )


def _of_parts(sliced: Sliced) -> Sliced:
    """The same for layers that have the part which the tensor belongs to."""
    present = _PRESENT.get(sliced.rule.ours.removeprefix("layers.{i}.").partition(".")[0])
    if present is None:
        return sliced
    layer = sliced.rule.layer
    return replace(
        sliced, rule=replace(sliced.rule, layer=lambda m, number: present(m, number) and layer(m, number))
    )


_PRESENT: Mapping[str, Callable[[ModelConfig, int], bool]] = MappingProxyType(
    {
        **dict.fromkeys(("attention", "input_norm"), in_layers("*")),
        "mlp": in_layers("-E"),
        "mlp_norm": lambda model, _: with_both(model),
    }
)
"""Part of a layer -> whether a layer has it."""


def links_of(
    table: Iterable[Sliced], model: ModelConfig, vocab_size: int
) -> Mapping[str, tuple[Sliced, Link]]:
    """Core's name -> its rule and which part of ours it is, for a model of this shape."""
    table = tuple(table)
    layered = [sliced for sliced in table if "{i}" in sliced.rule.ours]
    longer = model.model_copy(update={"num_layers": model.num_layers + (model.mtp_num_layers or 0)})
    parts = (
        (table, model, lambda name: name),
        (_behind(_further(), model), longer, lambda name: further_name(name, model)),
        (_behind(layered, model), longer, lambda name: further_name(name, model, "transformer_layer.")),
    )
    return {
        named(name): (sliced, replace(link, key=Key(link.key.name, sliced.kind)))
        for part, shaped, named in parts
        for sliced in part
        for name, link in Table.of([sliced.rule], shaped, vocab_size).by_theirs.items()
    }


def _behind(table: Iterable[Sliced], model: ModelConfig) -> Iterator[Sliced]:
    """The rules for the layers behind the model's last one, as which these are."""
    for sliced in table:
        layer = sliced.rule.layer
        behind = partial(lambda layer, _, number: number >= model.num_layers and layer(model, number), layer)
        yield replace(sliced, rule=replace(sliced.rule, layer=behind))


_WHOLE = frozenset(sliced.rule.theirs for sliced in (*rules(3.0), *_further()) if sliced.letter is None)


def held_whole(name: str) -> bool:
    """Whether each tensor-parallel rank has all of a tensor with this (Core) name."""
    return EXPERT.sub(r"\1{x}.\3", _IN_LAYER.sub("decoder.layers.{i}.", name)) in _WHOLE
