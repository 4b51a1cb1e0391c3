"""The table of tensors: rules between Megatron-Core's and ours, and the dims that ranks split.

`dialects.py` translates the names of all generations into the names of this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from megazero.checkpoint.box import Box
from megazero.checkpoint.naming import (
    Table,
    TensorLink,
    TensorRule,
    always,
    biased,
    of_kinds,
    qkv_biased,
    untied,
    with_experts,
    with_shared_experts,
    without_experts,
)
from megazero.checkpoint.part import ROUTER, WEIGHT, Key
from megazero.formats.megatron.dialects import BLOCK, EXPERT, HEAD, LAYER, WORD
from megazero.formats.megatron.hybrid import alone_in, mixer_rules, with_both
from megazero.formats.megatron.latent import (
    further_name,
    further_norms,
    further_rows,
    latent_norms,
    latent_rows,
)
from megazero.formats.megatron.masked import with_binary_head, with_masked_head, with_types
from megazero.spec.experts import MoeSpec
from megazero.spec.model import LayerSpec, ModelSpec
from megazero.spec.parts import AttentionSpec

VERSIONS = (0.0, 1.0, 2.0, 3.0)
_IN_LAYER = re.compile(rf"^(?:{LAYER}|{re.escape(BLOCK)}\d+\.)")


@dataclass(frozen=True)
class ShardedRule:
    """A rule, and the way in which tensor-parallel ranks split the tensor.

    Attributes:
        rule: the rule.
        letter: the dim that ranks split; None if each rank has the whole. A vocabulary (letter v) is padded
            at its end, by any number of rows.
        kind: our kind of the tensor.
        either: the dim that some implementations split, while others have the whole on each rank.
    """

    rule: TensorRule
    letter: str | None = None
    kind: str = WEIGHT
    either: str | None = None

    def boxes(self, link: TensorLink, ranks: int, rows: int) -> Iterator[Box]:
        """The box of our tensor that each rank has; `rows` is the number of rows in a rank's tensor."""
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

    def fitted(self, link: TensorLink, shapes: tuple[tuple[int, ...], ...]) -> ShardedRule:
        """Choose between `letter` and `either` by the shapes on the ranks."""
        split = self.either is not None and len(shapes) > 1 and shapes[0] != link.their_shape
        return replace(self, letter=self.either) if split else self

    def shape(self, link: TensorLink, ranks: int) -> tuple[int, ...] | None:
        """The shape of one rank's tensor (whole for a vocabulary); None if the dim does not divide."""
        if self.letter is None or self.letter == "v":
            return link.their_shape
        dim = self.rule.dims.split().index(self.letter)
        if link.shape[dim] % ranks:
            return None
        box = next(self.boxes(link, ranks, 0))
        return replace(link, box=box).their_shape


Present = Callable[[LayerSpec], bool]
"""Whether a layer has a tensor."""


def _with_layer_norm(spec: ModelSpec) -> bool:
    return spec.norm.by_mean


def _gated(layer: LayerSpec) -> bool:
    mlp = layer.mlp.expert if isinstance(layer.mlp, MoeSpec) else layer.mlp
    return mlp is not None and mlp.activation.gated


def _with_offset(layer: LayerSpec) -> bool:
    return isinstance(layer.attention, AttentionSpec) and layer.attention.softmax == "learnable"


def _with_norm(name: str) -> Present:
    """Whether the attention of a layer has a norm of this name."""
    return lambda layer: getattr(layer.attention, name, None) is not None


def _both(first: Present, second: Present) -> Present:
    return lambda layer: first(layer) and second(layer)


def _mlp_rows() -> Iterator[ShardedRule]:
    """The tensors of dense MLPs, of experts, of shared experts, and of routers."""
    core = "decoder.layers.{i}.mlp"
    kinds = (
        ("mlp", "", "f", core, without_experts),
        ("mlp.experts", "x ", "m", f"{core}.experts.local_experts.{{x}}", with_experts),
        ("mlp.shared", "", "w", f"{core}.shared_experts", with_shared_experts),
    )
    for ours, expert, letter, theirs, layer in kinds:
        merged = f"({expert}2 {letter})", f"({expert}{letter})"
        tables = (
            ("up", f"{expert}2 {letter} h", "linear_fc1", f"{merged[0]} h", _gated),
            ("up", f"{expert}{letter} h", "linear_fc1", f"{merged[1]} h", lambda layer: not _gated(layer)),
            ("down", f"{expert}h {letter}", "linear_fc2", f"({expert}h) {letter}", always),
        )
        for which, dims, called, their_dims, form in tables:
            present = _both(layer, form)
            name = f"layers.{{i}}.{ours}.{which}", f"{theirs}.{called}"
            rule = TensorRule(f"{name[0]}.weight", dims, f"{name[1]}.weight", their_dims, layer=present)
            yield ShardedRule(rule, letter)
            rows = dims.rpartition(" ")[0], their_dims.rpartition(" ")[0]
            rule = TensorRule(f"{name[0]}.bias", rows[0], f"{name[1]}.bias", rows[1], None, biased, present)
            yield ShardedRule(rule, letter if which == "up" else None)
    ours, router = "layers.{i}.mlp", f"{core}.router"
    yield _row(f"{ours}.router.weight", "x h", f"{router}.weight", layer=with_experts)
    bias = _row(
        f"{ours}.router.bias",
        "x",
        f"{router}.expert_bias",
        when=lambda spec: spec.router is not None and spec.router.expert_bias,
        layer=with_experts,
    )
    yield replace(bias, kind=ROUTER)
    yield _row(
        f"{ours}.shared_gate.weight",
        "1 h",
        f"{core}.shared_experts.gate_weight",
        layer=lambda layer: isinstance(layer.mlp, MoeSpec) and layer.mlp.shared_gate,
    )


def _latent_rows() -> Iterator[ShardedRule]:
    ours, theirs = "layers.{i}.attention", "decoder.layers.{i}.self_attention"
    for name, dims, called, their_dims, letter, layer in latent_rows():
        rule = TensorRule(f"{ours}.{name}.weight", dims, f"{theirs}.{called}.weight", their_dims, layer=layer)
        # Ranks have the whole projections down with Transformer Engine, but split them in Core's own layers.
        yield ShardedRule(rule, letter, either=None if letter else dims[0])
    for name, called, dim in latent_norms():
        yield from _norm(f"{ours}.{name}", f"{theirs}.{called}", dim=dim, layer=_with_norm(name))


def _hybrid_rows() -> Iterator[ShardedRule]:
    """The tensors of hybrids: mixers, and the only norm of layers that are just a mixer or just an MLP."""
    for theirs, letters in (("pre_mlp_layernorm", "-E"), ("norm", "M")):
        for sliced in _norm("layers.{i}.input_norm", f"decoder.layers.{{i}}.{theirs}"):
            yield replace(sliced, rule=replace(sliced.rule, layer=alone_in(letters)))
    for rule, letter in mixer_rules("decoder.layers.{i}.mixer"):
        yield ShardedRule(rule, letter)


def _further() -> Iterator[ShardedRule]:
    """The tensors of blocks for multi-token prediction, besides those of their layers."""
    ours, theirs = "layers.{i}", "decoder.layers.{i}"
    for name, dims, called, their_dims, letter in further_rows():
        yield ShardedRule(TensorRule(f"{ours}.{name}", dims, f"{theirs}.{called}", their_dims), letter)
    for name, called in further_norms():
        for kind, when in (("weight", always), ("bias", _with_layer_norm)):
            rule = TensorRule(f"{ours}.{name}.{kind}", "h", f"{theirs}.{called}.{kind}", "h", when=when)
            yield ShardedRule(rule)


def _row(
    ours: str,
    dims: str,
    theirs: str,
    their_dims: str | None = None,
    letter: str | None = None,
    when: Callable[[ModelSpec], bool] = always,
    layer: Present = always,
) -> ShardedRule:
    return ShardedRule(TensorRule(ours, dims, theirs, their_dims or dims, None, when, layer), letter)


def _norm(
    ours: str,
    theirs: str,
    when: Callable[[ModelSpec], bool] = always,
    *,
    dim: str = "h",
    layer: Present = always,
) -> tuple[ShardedRule, ShardedRule]:
    def with_bias(spec: ModelSpec) -> bool:
        return when(spec) and _with_layer_norm(spec)

    return (
        _row(f"{ours}.weight", dim, f"{theirs}.weight", when=when, layer=layer),
        _row(f"{ours}.bias", dim, f"{theirs}.bias", when=with_bias, layer=layer),
    )


def rules(checkpoint_version: float) -> tuple[ShardedRule, ...]:
    """The table for a checkpoint version: Megatron has changed the order of fused q, k and v twice."""
    # 0: all queries, then all keys, then all values. 1: q, k, v of each channel. 2 and later: queries, key
    # and value of each head, or group of heads, which ranks can split without reordering.
    qkv = {0.0: "(s g d)", 1.0: "(g d s)"}.get(checkpoint_version, "(g s d)")

    ours, core = "layers.{i}", "decoder.layers.{i}"
    attention = f"{core}.self_attention"
    softmax = f"{attention}.core_attention"
    plain = (
        _row("embedding.word.weight", "v h", WORD, "v h", "v"),
        *_norm("embedding.norm", "embedding.word_embeddings.norm", lambda s: s.embedding.norm is not None),
        _row(
            "embedding.position.weight",
            "p h",
            "embedding.position_embeddings.weight",
            when=lambda spec: spec.embedding.positions > 0,
        ),
        _row("embedding.token_type.weight", "2 h", "embedding.tokentype_embeddings.weight", when=with_types),
        *_norm(f"{ours}.input_norm", f"{core}.input_layernorm"),
        *(
            _row(
                f"{ours}.attention.qkv.{kind}",
                f"g s d{h}",
                f"{attention}.linear_qkv.{kind}",
                qkv + h,
                "g",
                when,
                lambda layer: isinstance(layer.attention, AttentionSpec),
            )
            for kind, h, when in (("weight", " h", always), ("bias", "", qkv_biased))
        ),
        *_latent_rows(),
        _row(f"{ours}.attention.out.weight", "h a", f"{attention}.linear_proj.weight", "h a", "a"),
        _row(f"{ours}.attention.out.bias", "h", f"{attention}.linear_proj.bias", "h", when=biased),
        _row(
            f"{ours}.attention.softmax_offset",
            "q",
            f"{softmax}.softmax_offset",
            letter="q",
            layer=_with_offset,
        ),
        *_norm(f"{ours}.attention.q_norm", f"{attention}.q_layernorm", dim="d", layer=_with_norm("q_norm")),
        *_norm(f"{ours}.attention.k_norm", f"{attention}.k_layernorm", dim="d", layer=_with_norm("k_norm")),
        *_norm(f"{ours}.mlp_norm", f"{core}.pre_mlp_layernorm"),
        *_mlp_rows(),
        *_norm("final_norm", "decoder.final_layernorm"),
        _row("head.weight", "v h", HEAD, "v h", "v", untied),
        *(
            _row(f"{ours}.{kind}", dims if kind == "weight" else dims[0], f"{theirs}.{kind}", when=when)
            for ours, dims, theirs, when in (
                ("head.dense", "h e", "lm_head.dense", with_masked_head),
                ("head.norm", "h", "lm_head.layer_norm", with_masked_head),
                ("pooler", "h e", "pooler.dense", with_binary_head),
                ("binary_head", "2 h", "binary_head", with_binary_head),
            )
            for kind in ("weight", "bias")
        ),
        _row("head.bias", "v", "output_layer.bias", letter="v", when=with_masked_head),
    )
    return (*map(_of_parts, plain), *_hybrid_rows())


def _of_parts(sliced: ShardedRule) -> ShardedRule:
    """Restrict a rule to layers with the part (attention, MLP) that its tensor belongs to."""
    present = _PRESENT.get(sliced.rule.ours.removeprefix("layers.{i}.").partition(".")[0])
    if present is None:
        return sliced
    return replace(sliced, rule=replace(sliced.rule, layer=_both(present, sliced.rule.layer)))


_PRESENT: Mapping[str, Present] = MappingProxyType(
    {
        **dict.fromkeys(("attention", "input_norm"), of_kinds("*")),
        "mlp": of_kinds("-E"),
        "mlp_norm": with_both,
    }
)
"""Module in our names -> whether a layer has it."""


def links_of(
    table: Iterable[ShardedRule], spec: ModelSpec, vocab_size: int
) -> Mapping[str, tuple[ShardedRule, TensorLink]]:
    """Core's name -> its rule and its link to ours, for all tensors of a model."""
    table, layers = tuple(table), len(spec.layers)
    parts = (
        (table, False, lambda name: name),
        (_further(), True, lambda name: further_name(name, layers)),
        (table, True, lambda name: further_name(name, layers, "transformer_layer.")),
    )
    return {
        named(name): (sliced, replace(link, key=Key(link.key.name, sliced.kind)))
        for part, behind, named in parts
        for sliced in part
        for name, link in Table.of([sliced.rule], spec, vocab_size, behind=behind).by_theirs.items()
    }


_WHOLE = frozenset(sliced.rule.theirs for sliced in (*rules(3.0), *_further()) if sliced.letter is None)


def held_whole(name: str) -> bool:
    """Whether each tensor-parallel rank has the whole tensor with this name of Core's."""
    return EXPERT.sub(r"\1{x}.\3", _IN_LAYER.sub("decoder.layers.{i}.", name)) in _WHOLE
