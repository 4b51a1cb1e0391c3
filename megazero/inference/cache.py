"""Caches of the keys and values of earlier positions, so that a generated token costs one position's work."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.layers.attention_cores import KeyValueStore
from megazero.layers.context.cached import KeptRun, SharedStore
from megazero.layers.inputs import Attends
from megazero.mpu.group import Group
from megazero.ops.attention import Pattern

_Pair = tuple[Tensor, Tensor]  # keys and values
_BLOCK = 1024


class KeyValueCache(KeyValueStore):
    """The keys and values that each layer may still attend to.

    A layer without a window has preallocated buffers, [max_length, b, g/tp, d] each, with the shape, dtype
    and device of its first keys, so the cache works for any model and any slice of it. A layer with a window
    keeps the keys in the window and the sinks, the first keys, which are always visible; its memory is
    bounded.

    Args:
        max_length: the most positions that the cache holds.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length
        self._buffers: dict[int, _Pair] = {}
        self._windows: dict[int, _Pair] = {}
        self._lengths: dict[int, int] = {}
        self.states: dict[int, tuple[Tensor, ...]] = {}

    @property
    def elements(self) -> int:
        """The number of elements in memory."""
        cached = (*self._buffers.values(), *self._windows.values(), *self.states.values())
        return sum(x.numel() for tensors in cached for x in tensors)

    def extend(self, attends: Attends, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g/tp, d] to a layer; return all positions that it may attend to, [t, b, g/tp, d].

        Raises ConfigError if the cache would hold more than `max_length` positions.
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
        if left >= 0 and _is_relative(attends.pattern):
            return self._in_window(layer, key, value, left, attends.pattern.sinks)
        if layer not in self._buffers:
            shape = self.max_length, *key.shape[1:]
            self._buffers[layer] = key.new_empty(shape), value.new_empty(self.max_length, *value.shape[1:])
        keys, values = self._buffers[layer]
        keys[start:stop] = key
        values[start:stop] = value
        return keys[:stop], values[:stop]

    def _in_window(self, layer: int, key: Tensor, value: Tensor, left: int, sinks: int) -> _Pair:
        """Return the cached positions and the new ones; keep those that later positions may attend to.

        There may be a gap between the sinks and the other keys. That is harmless: distances to the other keys
        are right, and sinks are visible at any distance.
        """
        pair = key, value
        if layer in self._windows:
            cached = self._windows[layer]
            pair = torch.cat((cached[0], key)), torch.cat((cached[1], value))
        t = len(pair[0])
        # `cat` copies; a slice would keep the memory of a long prompt alive.
        first, last = min(sinks, t), max(min(sinks, t), t - left)
        keys, values = (torch.cat((x[:first], x[last:])) for x in pair)
        self._windows[layer] = keys, values
        return pair


class SharedCache(SharedStore):
    """Keys and values split over ranks by blocks of positions, for prompts too long for one rank.

    Blocks go to the ranks in turn. Keys outside a layer's window are dropped.

    Args:
        sharers: the ranks that split the cache.
        block: positions of a block.
    """

    def __init__(self, sharers: Group, block: int = _BLOCK):
        self.sharers, self.block = sharers, block
        self._runs: dict[int, list[KeptRun]] = {}
        self._lengths: dict[int, int] = {}
        self.states: dict[int, tuple[Tensor, ...]] = {}

    @property
    def elements(self) -> int:
        """The number of elements in this rank's memory."""
        runs = (run for of_layer in self._runs.values() for run in of_layer)
        states = sum(x.numel() for tensors in self.states.values() for x in tensors)
        return states + sum(run.keys.numel() + run.values.numel() for run in runs)

    def extend(self, attends: Attends, key: Tensor, value: Tensor) -> tuple[int, list[KeptRun]]:
        """Append [s, b, g/tp, d] to a layer, see `SharedStore`; drop keys that no later position sees."""
        layer = attends.layer
        start = self._lengths.get(layer, 0)
        stop = self._lengths[layer] = start + len(key)
        runs, at = self._runs.setdefault(layer, []), start
        while at < stop:
            end = min(stop, (at // self.block + 1) * self.block)
            if at // self.block % self.sharers.size == self.sharers.rank:
                rows = slice(at - start, end - start)
                self._append(runs, KeptRun(at, key[rows].clone(), value[rows].clone()))
            at = end
        visible = list(runs)
        pattern = attends.pattern
        left, _ = pattern.sides(attends.causal)
        if left >= 0 and _is_relative(pattern):
            oldest = stop - left
            runs[:] = [r for r in runs if r.start + len(r.keys) > oldest or r.start < pattern.sinks]
        return start, visible

    def _append(self, runs: list[KeptRun], run: KeptRun) -> None:
        """Append a run; join it with the last run if it continues the same block."""
        if runs and runs[-1].start + len(runs[-1].keys) == run.start and run.start % self.block:
            last = runs.pop()
            run = KeptRun(last.start, torch.cat((last.keys, run.keys)), torch.cat((last.values, run.values)))
        runs.append(run)


def _is_relative(pattern: Pattern) -> bool:
    """Whether attention depends on the distance between positions alone, not on the positions themselves."""
    return pattern.layout is None and pattern.prefix == 0
