"""Keys and values of earlier positions, so that each generated token takes the work of one position."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.layers.attention_cores import KeyValueStore
from megazero.layers.inputs import Attends
from megazero.ops.attention import Pattern

_Pair = tuple[Tensor, Tensor]


class KeyValueCache(KeyValueStore):
    """Keys and values in memory that each layer fills up to what it may still attend to.

    A layer without a window has preallocated buffers, [max_length, b, g/tp, d] each, which take their shape,
    dtype and device from the tensors given, so the cache works for any model and any slice of it. A layer
    with a window keeps the keys in it and the first ones that no window hides, and its memory stops growing.

    Args:
        max_length: number of positions that may be given.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length
        self._buffers: dict[int, _Pair] = {}
        self._windows: dict[int, _Pair] = {}
        self._lengths: dict[int, int] = {}
        self.states: dict[int, tuple[Tensor, ...]] = {}

    @property
    def elements(self) -> int:
        """Number of elements in memory."""
        kept = (*self._buffers.values(), *self._windows.values(), *self.states.values())
        return sum(x.numel() for tensors in kept for x in tensors)

    def extend(self, attends: Attends, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g/tp, d] for a layer and return all positions that it may attend to, [t, b, g/tp, d].

        Raises:
            ConfigError: there are more positions than fit.
        """
        layer = attends.layer
        start = self._lengths.get(layer, 0)
        stop = start + key.shape[0]
        if stop > self.max_length:
            raise ConfigError(
                f"`max_length` of the key-value cache must be at least {stop}, but is {self.max_length}; "
                f"make a longer cache or generate fewer tokens"
            )
        self._lengths[layer] = stop
        left, _ = attends.pattern.sides(attends.causal)
        if left >= 0 and _only_by_distance(attends.pattern):
            return self._in_window(layer, key, value, left, attends.pattern.sinks)
        if layer not in self._buffers:
            self._buffers[layer] = self._buffer(key), self._buffer(value)
        keys, values = self._buffers[layer]
        keys[start:stop] = key
        values[start:stop] = value
        return keys[:stop], values[:stop]

    def _in_window(self, layer: int, key: Tensor, value: Tensor, left: int, sinks: int) -> _Pair:
        """The kept positions and the new ones; then those that later ones may attend to are kept.

        Between the first keys, which are seen from anywhere, and the others a gap may lie. Distances on one
        side of it are those of the sequence, and no others matter.
        """
        pair = key, value
        if layer in self._windows:
            kept = self._windows[layer]
            pair = torch.cat((kept[0], key)), torch.cat((kept[1], value))
        t = len(pair[0])
        # Copies, or a slice would keep the memory of a long prompt.
        first, last = min(sinks, t), max(min(sinks, t), t - left)
        keys, values = (torch.cat((x[:first], x[last:])) for x in pair)
        self._windows[layer] = keys, values
        return pair

    def _buffer(self, x: Tensor) -> Tensor:
        return x.new_empty(self.max_length, *x.shape[1:])


def _only_by_distance(pattern: Pattern) -> bool:
    """Whether the keys that a query attends to depend on how far they are, and not on places."""
    return pattern.layout is None and pattern.prefix == 0
