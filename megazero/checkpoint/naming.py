"""Rules that map tensors of other libraries ("theirs") to megazero's ("ours"), in both directions.

    TensorRule("layers.{i}.attention.qkv.weight", "g s d h", "h.{i}.attn.k.weight", "(g s d) h", KEY)

says: our tensor has the dims g, s, d, h. Their tensor has two dims. The first runs through g, s and d, with d
fastest, and has only one slot of s, the key's. A transpose is another order of the letters. If one of our
tensors is several of theirs, several rules take different parts of it. As a merged dim can be split again
without moving anything, their tensor can be viewed with our dims, and is read and written through that view.
The notation is that of einops (Rogozhnikov 2022).

A number is the size of a dim. A letter's size follows from the model's spec (`_ends`, `_dims`):

==========  =====================================================================================
anywhere    h and e hidden size, j twice the hidden size
ends        v vocabulary, p positions, b buckets of relative distance, q query heads, n classes
attention   q query heads, g groups (key/value heads), s slots of a group: its queries, key, value;
            d channels of a head, a channels of all values, k channels of all keys
latent      q, d and a as above, r width of the vector that queries are made of, l width of the
            compressed vector, z compressed vector and rotated key, y channels of a head's plain
            key and value, which are made of the compressed vector
MLP         f inner width
experts     x experts, m inner width of an expert, w inner width of the shared experts together
mixer       G groups of heads, H heads of a group; of each group: W channels of its heads, R outputs
            of the input projection, C channels of the convolution; M channels of all heads
==========  =====================================================================================

A name of theirs with ``{x}`` stands for one tensor per expert, which has that expert's slot of x. A dim of
theirs that is always 1 is written ``()``.
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
"""(letter, range of that dim of ours that their tensor has); negative bounds count from the end."""

Sizes = Mapping[str, int]
"""Letter -> size."""


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
    """Whether a tensor is present: in layers with one of these parts, by their letters in hybrid patterns."""

    def present(layer: LayerSpec) -> bool:
        mlp = "E" if layer.experts else "-" * (layer.mlp is not None)
        parts = f"{'*' * (layer.attention is not None)}{'M' * (layer.mixer is not None)}{mlp}"
        return any(letter in letters for letter in parts)

    return present


@dataclass(frozen=True)
class TensorRule:
    """A rule between one of their tensors and a part of one of ours; see the module.

    Attributes:
        ours: our global name, or ``name/kind`` for another kind than weights (see `Key`). ``{i}`` is the
            number of the layer.
        dims: our dims, one letter or number each.
        theirs: their name. ``{i-1}`` is the number of the layer before (the first layer has no such tensor),
            ``{last}`` the last layer's, ``{j}`` the number within the decoder of an encoder-decoder,
            ``{i/2}`` the number where two layers of ours are one of theirs, ``{x}`` the number of the expert.
        their_dims: their dims, with merged ones in parentheses.
        take: the part of ours that their tensor has; None for all.
        when: whether a model has these tensors.
        layer: whether a layer has them.
    """

    ours: str
    dims: str
    theirs: str
    their_dims: str
    take: Take | Callable[[Sizes], Take] | None = None
    when: Callable[[ModelSpec], bool] = always
    layer: Callable[[LayerSpec], bool] = always


@dataclass(frozen=True)
class TensorLink:
    """A rule applied to one layer (and expert) of one model.

    Attributes:
        key: our tensor.
        shape: the shape of our whole tensor.
        box: the part of ours that their tensor has.
        theirs: the name of their tensor.
        merged: for each of their dims, the dims of ours that it runs through, slowest first.
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
        """Whether elements have the same order in both tensors."""
        order = [dim for dims in self.merged for dim in dims]
        return order == sorted(order)

    @property
    def in_rows(self) -> TensorLink:
        """The link to their tensor as a matrix, with all dims but the last merged into rows."""
        *rows, last = self.merged
        if len(rows) < 2:
            return self
        return replace(self, merged=(tuple(dim for dims in rows for dim in dims), last))

    def as_ours(self, theirs: Tensor, box: Box | None = None) -> Tensor:
        """View their contiguous tensor, or those rows of it that have our `box`, with our dims."""
        shape = (box or self.box).shape
        order = [dim for dims in self.merged for dim in dims]
        split = theirs.view([shape[dim] for dim in order])
        return split.permute([order.index(dim) for dim in range(len(shape))])

    def rows_of(self, box: Box) -> tuple[slice, Box]:
        """Consecutive rows of their tensor that contain our `box`, and the box of ours that the rows are."""
        offset, shape = list(self.box.offset), list(self.box.shape)
        unit, start = self.their_shape[0], 0
        for dim in self.merged[0]:
            unit //= self.box.shape[dim]
            start += (box.offset[dim] - self.box.offset[dim]) * unit
            offset[dim], shape[dim] = box.offset[dim], box.shape[dim]
            if box.shape[dim] > 1:  # a part of the next dim would not be consecutive rows
                break
        count = math.prod(shape[dim] for dim in self.merged[0])
        return slice(start, start + count), Box(tuple(offset), tuple(shape))


def cut(box: Box, dims: Sequence[int], limit: int) -> Iterator[Box]:
    """Cut a box into parts of at most `limit` elements, along the first of `dims`, then the next."""
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
    """The sizes of dims outside the layers."""
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
    """All links of one model; no two name the same tensor of theirs."""

    links: tuple[TensorLink, ...]

    @classmethod
    def of(
        cls, rules: Iterable[TensorRule], spec: ModelSpec, vocab_size: int, *, behind: bool = False
    ) -> Table:
        """Apply rules to a model or, with `behind`, to its layers for multi-token prediction alone."""
        every, count = spec.every_layer, len(spec.layers)
        numbers = range(count, len(every)) if behind else range(count)
        ends, sides = (count - 1, spec.encoder_layers), _ends(spec, vocab_size)
        sizes = {number: _dims(every[number]) for number in numbers}
        links = []
        # Links are in the order of layers, so that a shard of a written model has whole layers.
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
    def by_key(self) -> Mapping[Key, tuple[TensorLink, ...]]:
        """Our tensor -> its links, in the order of the rules."""
        by_key: dict[Key, list[TensorLink]] = defaultdict(list)
        for link in self.links:
            by_key[link.key].append(link)
        return MappingProxyType({key: tuple(links) for key, links in by_key.items()})

    @cached_property
    def by_theirs(self) -> Mapping[str, TensorLink]:
        """The name of their tensor -> its link."""
        return MappingProxyType({link.theirs: link for link in self.links})

    @cached_property
    def shapes(self) -> Mapping[Key, tuple[int, ...]]:
        """Our tensor -> its shape."""
        return MappingProxyType({key: links[0].shape for key, links in self.by_key.items()})


def _link(
    rule: TensorRule, number: int | None, slot: int | None, ends: tuple[int, int], sizes: Sizes
) -> TensorLink:
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
    return TensorLink(Key(ours, kind or WEIGHT), shape, box, theirs, merged)


def named_in(
    template: str, number: int | None, slot: int | None = None, ends: tuple[int, int] = (0, 0)
) -> str:
    """Fill in a name of a rule for a layer and an expert.

    Args:
        template: the name, with ``{i}`` and so on.
        number: the layer.
        slot: the expert.
        ends: the number of the last layer, and the first number of the decoder.
    """
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
