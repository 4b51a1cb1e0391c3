"""Naming: which tensor of a foreign model holds which numbers of one of ours, in both directions.

    TensorRule("layers.{i}.attention.qkv.weight", "g s d h", "h.{i}.attn.k.weight", "(g s d) h", KEY)

says: our tensor has the dims g, s, d, h. Theirs has two dims; the first runs through g, s and d, with d
fastest; and it holds only one slot of s, the key's. A transpose is another order of the letters; if one of
our tensors is several of theirs, several rules take different parts of it. Since the dims that theirs merges
can be split again without moving anything, their tensor *seen as ours* is a view, through which it is both
read and written. The notation is that of einops (Rogozhnikov 2022).

A number is the size of a dim; the sizes of letters are what the model's spec says (`_ends`, `_dims`):

==========  =====================================================================================
anywhere    h and e hidden, j two vectors of that width
ends        v vocabulary, p positions, b kinds of distance, q query heads, n classes
attention   q query heads, g groups of them, s slots of a group: its queries, key and value,
            d channels of a head, a channels of all values, k channels of all keys
latent      q, d and a, r width of what queries are made of, l width of the small vector,
            z that and the rotated key, y channels of a head that are made of the small vector
MLP         f inner width
experts     x experts, m inner width of an expert, w that of the shared ones together
mixer       G groups of heads, H heads of a group, W their channels, R outputs of the first
            projection, C channels of the convolution (all of a group), M channels of all heads
==========  =====================================================================================

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
from megazero.spec.experts import MoeSpec
from megazero.spec.model import LayerSpec, ModelSpec
from megazero.spec.parts import AttentionSpec, LatentAttentionSpec, MixerSpec, MlpSpec

Take = tuple[str, slice]
"""The part of one of our dims that theirs holds; negative bounds count from the end."""

Sizes = Mapping[str, int]
"""Letter -> size, for a model."""


def always(spec: ModelSpec | LayerSpec) -> bool:
    """Whether a tensor is present: always."""
    return True


def biased(spec: ModelSpec) -> bool:
    """Whether a tensor is present: where linear layers have biases."""
    return spec.stream.bias


def untied(spec: ModelSpec) -> bool:
    """Whether a tensor is present: where the output head has a weight of its own."""
    return not spec.head.tied


def with_experts(layer: LayerSpec) -> bool:
    """Whether a tensor is present: in layers with experts."""
    return layer.experts > 0


def with_shared_experts(layer: LayerSpec) -> bool:
    """Whether a tensor is present: in layers with experts, if some of them are shared."""
    return isinstance(layer.mlp, MoeSpec) and layer.mlp.shared is not None


def without_experts(layer: LayerSpec) -> bool:
    """Whether a tensor is present: in layers with an MLP."""
    return isinstance(layer.mlp, MlpSpec)


def qkv_biased(spec: ModelSpec) -> bool:
    """Whether a tensor is present: where queries, keys and values have biases."""
    return any(isinstance(part, AttentionSpec) and part.qkv_bias for part in spec.attentions())


def of_kinds(letters: str) -> Callable[[LayerSpec], bool]:
    """Whether a tensor is present: in layers with a part of these letters, as a hybrid pattern has them."""

    def present(layer: LayerSpec) -> bool:
        mlp = "E" if layer.experts else "-" * (layer.mlp is not None)
        parts = f"{'*' * (layer.attention is not None)}{'M' * (layer.mixer is not None)}{mlp}"
        return any(letter in letters for letter in parts)

    return present


@dataclass(frozen=True)
class TensorRule:
    """One of their tensors, and which part of ours it is; see the module.

    Attributes:
        ours: global name, behind which ``/kind`` says which of its tensors, unless it is the weight (see
            `Key`); ``{i}`` stands for every layer's number.
        dims: our dims, a letter each.
        theirs: their name; ``{i-1}`` stands for the number of the layer before (the first one has no such
            tensor), ``{last}`` for the last one's, ``{j}`` for a decoder's layer's own after an encoder,
            ``{i/2}`` for that of a layer of theirs that two of ours are, ``{x}`` for every expert's.
        their_dims: their dims, with merged ones in parentheses.
        take: the part of ours that theirs holds, which may depend on the sizes; None for all.
        when: says whether a model has these tensors.
        layer: says whether a layer has them, as layers may differ.
    """

    ours: str
    dims: str
    theirs: str
    their_dims: str
    take: Take | Callable[[Sizes], Take] | None = None
    when: Callable[[ModelSpec], bool] = always
    layer: Callable[[LayerSpec], bool] = always


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
        """Shape of the tensor in the foreign checkpoint."""
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


def _ends(spec: ModelSpec, vocab_size: int) -> Sizes:
    """The sizes of dims beside the layers."""
    hidden = spec.stream.width
    return {
        **{"h": hidden, "e": hidden, "j": 2 * hidden, "v": vocab_size, "p": spec.positions},
        "b": 0 if spec.relative is None else spec.relative.kinds,
        "q": max((attention.heads for attention in spec.attentions()), default=0),
        "n": spec.head.classes or 0,
    }


def _dims(layer: LayerSpec) -> Sizes:
    """The sizes of dims in a layer."""
    hidden = layer.stream.width
    sizes = {"h": hidden, "e": hidden, "j": 2 * hidden}
    for part in (layer.attention, layer.mixer, layer.mlp):
        match part:
            case AttentionSpec(heads=n, groups=g, head_dim=d):
                sizes |= {"q": n, "g": g, "s": n // g + 2, "d": d, "a": n * d, "k": g * d}
            case LatentAttentionSpec(heads=n, rank=rank):
                sizes |= {"q": n, "d": part.head_dim, "a": n * part.value_dim, "l": rank}
                sizes |= {"r": part.query_rank or hidden, "z": rank + part.rotary_dim}
                sizes["y"] = part.plain_dim + part.value_dim
            case MixerSpec(groups=g, width=width):
                sizes |= {"G": g, "H": part.heads // g, "W": width // g, "R": part.rows // g, "M": width}
                sizes["C"] = width // g + 2 * part.state
            case MlpSpec(width=width):
                sizes["f"] = width
            case MoeSpec(experts=experts, expert=expert, shared=shared):
                sizes |= {"x": experts, "m": expert.width, "w": 0 if shared is None else shared.width}
    return sizes


@dataclass(frozen=True)
class Table:
    """All links of one model. No two name the same tensor of theirs."""

    links: tuple[Link, ...]

    @classmethod
    def of(
        cls, rules: Iterable[TensorRule], spec: ModelSpec, vocab_size: int, *, behind: bool = False
    ) -> Table:
        """The rules for a model; with `behind`, those of layers alone, for the layers of further tokens."""
        every, count = spec.every_layer, len(spec.layers)
        numbers = range(count, len(every)) if behind else range(count)
        ends, sides = (count - 1, spec.encoder_layers), _ends(spec, vocab_size)
        sizes = {number: _dims(every[number]) for number in numbers}
        links = []
        # Layer after layer, so that a file holds whole ones.
        for layered, run in groupby((r for r in rules if r.when(spec)), lambda rule: "{i}" in rule.ours):
            block = list(run)
            if not layered:
                links += [] if behind else [_link(rule, None, None, ends, sides) for rule in block]
                continue
            for number in numbers:
                for rule in block:
                    if not rule.layer(every[number]) or (number == 0 and "{i-1}" in rule.theirs):
                        continue
                    slots = range(sizes[number]["x"]) if "{x}" in rule.theirs else (None,)
                    links += [_link(rule, number, slot, ends, sizes[number]) for slot in slots]
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
    shape = tuple(int(letter) if letter.isdigit() else sizes[letter] for letter in letters)
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
