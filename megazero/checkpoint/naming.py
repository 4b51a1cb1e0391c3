"""Naming: which tensor of a foreign model holds which numbers of one of ours, in both directions.

    TensorRule("layers.{i}.attention.qkv.weight", "g s d h", "h.{i}.attn.k.weight", "(g s d) h", KEY)

says: our tensor has the dims g, s, d, h. Theirs has two dims; the first runs through g, s and d, with d
fastest; and it holds only one slot of s, the key's. A transpose is another order of the letters; if one of
our tensors is several of theirs, several rules take different parts of it. Since the dims that theirs merges
can be split again without moving anything, their tensor *seen as ours* is a view, through which it is both
read and written. The notation is that of einops (Rogozhnikov 2022).

The letters, whose sizes `dim_sizes` gives:

====  ===========================================
v     vocabulary
p     positions
h     hidden
g     groups of heads that share a key and a value
s     slots of a group: its queries, key and value
d     channels of a head
a     channels of the values of all query heads
k     channels of all keys
r     width of what latent attention makes queries of
l     width of the small vector of latent attention
z     that and its rotated key, together
y     channels of a head that it makes of the small vector
q     query heads
f     inner width of the MLP
c     halves of a gated MLP: gate, up
e     hidden, where a square matrix has it twice
j     two vectors of hidden width, one after the other
t     kinds of tokens
o     answers of the binary head: in order, swapped
n     classes of a classifier
x     experts of a layer
m     inner width of an expert
w     inner width of the shared experts, together; 1 if there are none
u     outputs of the shared experts' gate: one
b     kinds of distance with a bias of their own
P     positions before the first, which OPT's table has
G     groups of heads of a state-space mixer
H     heads of such a group
W     channels of these heads
R     outputs of the first projection for a group
C     channels of its convolution for a group
T     rows that it sees
M     channels of all heads of the mixer
====  ===========================================

A name of theirs with ``{x}`` is one tensor for each expert, which holds that expert's slot of x. A dim of
theirs that is always 1 is ``()``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from types import MappingProxyType

from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import WEIGHT, Key
from megazero.config.derive import experts_of
from megazero.config.tree.model import ModelConfig

Take = tuple[str, slice]
"""The part of one of our dims that theirs holds; negative bounds count from the end."""

Sizes = Mapping[str, int]
"""Letter -> size, for a model."""


def always(model: ModelConfig) -> bool:
    """Whether a tensor is present: in every model."""
    return True


def every_layer(model: ModelConfig, number: int) -> bool:
    """Whether a tensor is present: in every layer."""
    return True


def biased(model: ModelConfig) -> bool:
    """Whether a tensor is present: where linear layers have biases."""
    return model.add_bias_linear


def with_experts(model: ModelConfig, number: int) -> bool:
    """Whether a tensor is present: in layers with experts."""
    return experts_of(model, number) > 0


def with_shared_experts(model: ModelConfig, number: int) -> bool:
    """Whether a tensor is present: in layers with experts, if some of them are shared."""
    return model.moe_shared_expert_intermediate_size is not None and with_experts(model, number)


def without_experts(model: ModelConfig, number: int) -> bool:
    """Whether a tensor is present: in dense layers."""
    return experts_of(model, number) == 0


def qkv_biased(model: ModelConfig) -> bool:
    """Whether a tensor is present: where queries, keys and values have biases."""
    return model.qkv_bias


def untied(model: ModelConfig) -> bool:
    """Whether a tensor is present: where the output head has a weight of its own."""
    return model.untie_embeddings_and_output_weights


@dataclass(frozen=True)
class TensorRule:
    """One of their tensors, and which part of ours it is; see the module.

    Attributes:
        ours: global name, behind which ``/kind`` says which of its tensors, unless it is the weight (see
            `Key`); ``{i}`` stands for every layer's number.
        dims: our dims, a letter each.
        theirs: their name; ``{i-1}`` stands for the number of the layer before, ``{last}`` for the last
            one's, ``{j}`` for a decoder's layer's own after an encoder, ``{i/2}`` for that of a layer of
            theirs that two of ours are, ``{x}`` for every expert's.
        their_dims: their dims, with merged ones in parentheses.
        take: the part of ours that theirs holds, which may depend on the sizes; None for all.
        when: says whether a model has these tensors.
        layer: says whether a layer, given the model and the layer's number, has them, as layers may differ.
    """

    ours: str
    dims: str
    theirs: str
    their_dims: str
    take: Take | Callable[[Sizes], Take] | None = None
    when: Callable[[ModelConfig], bool] = always
    layer: Callable[[ModelConfig, int], bool] = every_layer


@dataclass(frozen=True)
class Link:
    """A rule with all letters and numbers filled in.

    Attributes:
        key: our tensor.
        shape: the shape of our whole tensor.
        box: the part that theirs holds.
        theirs: name of their tensor.
        merged: for each of their dims, those of ours that it runs through, slowest first.
    """

    key: Key
    shape: tuple[int, ...]
    box: Box
    theirs: str
    merged: tuple[tuple[int, ...], ...]

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of their tensor."""
        return tuple(math.prod(self.box.shape[dim] for dim in dims) for dims in self.merged)

    @property
    def is_straight(self) -> bool:
        """Whether their elements are in the same order as ours."""
        order = [dim for dims in self.merged for dim in dims]
        return order == sorted(order)

    @property
    def in_rows(self) -> Link:
        """The link to their tensor seen as a matrix, whose rows run through all dims but its last."""
        *rows, last = self.merged
        if len(rows) < 2:
            return self
        return replace(self, merged=(tuple(dim for dims in rows for dim in dims), last))

    def as_ours(self, theirs: Tensor, box: Box | None = None) -> Tensor:
        """Their contiguous tensor, or the rows of it that hold `box`, as a view with our dims."""
        shape = (box or self.box).shape
        order = [dim for dims in self.merged for dim in dims]
        split = theirs.view([shape[dim] for dim in order])
        return split.permute([order.index(dim) for dim in range(len(shape))])

    def rows_of(self, box: Box) -> tuple[slice, Box]:
        """Consecutive rows of theirs (along its first dim) that hold our `box`, and the box they make."""
        offset, shape = list(self.box.offset), list(self.box.shape)
        unit, start = self.their_shape[0], 0
        for dim in self.merged[0]:
            unit //= self.box.shape[dim]
            start += (box.offset[dim] - self.box.offset[dim]) * unit
            offset[dim], shape[dim] = box.offset[dim], box.shape[dim]
            if box.shape[dim] > 1:  # rows of a further dim's part would not be consecutive
                break
        count = math.prod(shape[dim] for dim in self.merged[0])
        return slice(start, start + count), Box(tuple(offset), tuple(shape))


def cut(box: Box, dims: Sequence[int], limit: int) -> Iterator[Box]:
    """`box` in parts of at most `limit` elements, cut along the first of `dims`, then the next, if needed."""
    if not dims or box.numel <= limit:
        yield box
        return
    dim, size = dims[0], box.shape[dims[0]]
    step = max(1, limit * size // box.numel)
    for start in range(0, size, step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(step, size - start)
        yield from cut(Box(tuple(offset), tuple(shape)), dims[1:], limit)


def dim_sizes(model: ModelConfig, vocab_size: int) -> Sizes:
    """Letter -> size, for this model."""
    groups, n = model.mamba_num_groups, model.mamba_state_dim
    return MappingProxyType(
        {
            "v": vocab_size,
            "p": model.positions,
            "h": model.hidden_size,
            "g": model.kv_heads,
            "s": model.num_attention_heads // model.kv_heads + 2,
            "d": model.head_dim,
            "a": model.num_attention_heads * model.value_dim,
            "k": model.kv_heads * model.head_dim,
            "r": model.q_lora_rank or model.hidden_size,
            "l": model.kv_lora_rank,
            "z": model.kv_lora_rank + model.qk_pos_emb_head_dim,
            "y": model.qk_head_dim + model.v_head_dim,
            "q": model.num_attention_heads,
            "f": model.ffn_size,
            "c": 2,
            "e": model.hidden_size,
            "j": 2 * model.hidden_size,
            "t": 2,
            "o": 2,
            "n": model.num_classes or 0,
            "x": max(model.num_experts, default=0),
            "m": model.expert_ffn_size,
            "w": model.moe_shared_expert_intermediate_size or 1,
            "u": 1,
            "b": model.t5_relative_buckets,
            "P": 2,
            "G": groups,
            "H": (model.mamba_heads or 0) // groups,
            "W": model.mamba_width // groups,
            "R": model.mamba_rows // groups,
            "C": model.mamba_width // groups + 2 * n,
            "T": 4,
            "M": model.mamba_width,
        }
    )


@dataclass(frozen=True)
class Table:
    """All links of one model. No two name the same tensor of theirs."""

    links: tuple[Link, ...]

    @classmethod
    def of(cls, rules: Iterable[TensorRule], model: ModelConfig, vocab_size: int) -> Table:
        """The rules for a model of this shape."""
        sizes = dim_sizes(model, vocab_size)
        present = [rule for rule in rules if rule.when(model)]
        links = []
        # Layer after layer, so that a file holds whole ones.
        for layered, run in groupby(present, lambda rule: "{i}" in rule.ours):
            block = list(run)
            ends = model.num_layers - 1, model.encoder_layers
            for number in range(model.num_layers) if layered else (None,):
                here = [rule for rule in block if number is None or rule.layer(model, number)]
                for rule in here:
                    slots = range(sizes["x"]) if "{x}" in rule.theirs else (None,)
                    links += [_link(rule, number, slot, ends, sizes) for slot in slots]
        return cls(tuple(links))

    @cached_property
    def by_key(self) -> Mapping[Key, tuple[Link, ...]]:
        """Our tensor -> the links it is made of, in the order of the rules."""
        by_key: dict[Key, list[Link]] = defaultdict(list)
        for link in self.links:
            by_key[link.key].append(link)
        return MappingProxyType({key: tuple(links) for key, links in by_key.items()})

    @cached_property
    def by_theirs(self) -> Mapping[str, Link]:
        """Their tensor -> its link to ours."""
        return MappingProxyType({link.theirs: link for link in self.links})

    @cached_property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        """The shapes of our tensors."""
        return MappingProxyType({key: links[0].shape for key, links in self.by_key.items()})


def _link(
    rule: TensorRule, number: int | None, slot: int | None, ends: tuple[int, int], sizes: Sizes
) -> Link:
    letters = rule.dims.split()
    shape = tuple(sizes[letter] for letter in letters)
    take = rule.take(sizes) if callable(rule.take) else rule.take
    takes: list[Take] = [] if take is None else [take]
    if slot is not None:
        takes.append(("x", slice(slot, slot + 1)))
    offset, size = [0] * len(shape), list(shape)
    for letter, part in takes:
        dim = letters.index(letter)
        start, stop, _ = part.indices(shape[dim])
        offset[dim], size[dim] = start, stop - start
    box = Box(tuple(offset), tuple(size))
    merged = tuple(tuple(letters.index(letter) for letter in group) for group in groups_of(rule.their_dims))
    ours, theirs = (named_in(name, number, slot, ends) for name in (rule.ours, rule.theirs))
    ours, _, kind = ours.partition("/")
    return Link(Key(ours, kind or WEIGHT), shape, box, theirs, merged)


def named_in(
    template: str, number: int | None, slot: int | None = None, ends: tuple[int, int] = (0, 0)
) -> str:
    """A rule's name in layer `number`, expert `slot`; `ends` are the last layer and the first decoder's."""
    marks: dict[str, int | None] = {"{i}": number, "{last}": ends[0], "{x}": slot}
    if number is not None:
        marks |= {"{i-1}": number - 1, "{j}": number - ends[1], "{i/2}": number // 2}
    for mark, value in marks.items():
        template = template.replace(mark, str(value))
    return template


def groups_of(dims: str) -> tuple[tuple[str, ...], ...]:
    """``"(g s d) h"`` -> ``(("g", "s", "d"), ("h",))``."""
    groups: list[tuple[str, ...]] = []
    for number, text in enumerate(dims.replace(")", "(").split("(")):
        letters = tuple(text.split())
        groups += [letters] if number % 2 else [(letter,) for letter in letters]
    return tuple(groups)
