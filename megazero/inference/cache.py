"""Caches of the keys and values of earlier positions, so that a generated token costs one position's work."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.inference.coded import GrowingRun
from megazero.layers.attention_cores import KeyValueStore
from megazero.layers.context.cached import KeptRun, SharedStore
from megazero.layers.inputs import Attends
from megazero.mpu.group import Group

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
        coded: whether blocks of positions are kept in codes of 8 bits; one call must not go beyond a block
            (see `BlockwiseCore`), and nothing is preallocated.
    """

    def __init__(self, max_length: int, *, coded: bool = False):
        self.max_length, self.coded = max_length, coded
        self._runs: dict[int, GrowingRun] = {}
        self._buffers: dict[int, _Pair] = {}
        self._windows: dict[int, _Pair] = {}
        self._lengths: dict[int, int] = {}
        self.states: dict[int, tuple[Tensor, ...]] = {}

    @property
    def bytes(self) -> int:
        """The bytes that are in memory."""
        runs = (run.tensors for run in self._runs.values())
        cached = (*self._buffers.values(), *self._windows.values(), *self.states.values(), *runs)
        return sum(x.nbytes for tensors in cached for x in tensors)

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
        left, sinks = _seen_again(attends)
        if self.coded:
            run = self._runs.setdefault(layer, GrowingRun(coded=True))
            run.append(key, value)
            pair = run.read()
            run.settle(left, sinks)
            return pair
        if left >= 0:
            return self._in_window(layer, key, value, left, sinks)
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
        coded: whether they are kept in codes of 8 bits; one call must not go beyond a block of codes, and a
            block of positions has whole ones.
    """

    def __init__(self, sharers: Group, block: int = _BLOCK, *, coded: bool = False):
        self.sharers, self.block, self.coded = sharers, block, coded
        self._runs: dict[int, list[GrowingRun]] = {}
        self._lengths: dict[int, int] = {}
        self.states: dict[int, tuple[Tensor, ...]] = {}

    @property
    def bytes(self) -> int:
        """The bytes that are in this rank's memory."""
        runs = (run.tensors for of_layer in self._runs.values() for run in of_layer)
        return sum(x.nbytes for tensors in (*runs, *self.states.values()) for x in tensors)

    def extend(self, attends: Attends, key: Tensor, value: Tensor) -> tuple[int, list[KeptRun]]:
        """Append [s, b, g/tp, d] to a layer, see `SharedStore`; drop keys that no later position sees."""
        layer = attends.layer
        start = self._lengths.get(layer, 0)
        stop = self._lengths[layer] = start + len(key)
        runs, at = self._runs.setdefault(layer, []), start
        while at < stop:
            end = min(stop, (at // self.block + 1) * self.block)
            if at // self.block % self.sharers.size == self.sharers.rank:
                if not (runs and runs[-1].stop == at and at % self.block):
                    runs.append(GrowingRun(at, coded=self.coded))
                rows = slice(at - start, end - start)
                runs[-1].append(key[rows].clone(), value[rows].clone())
            at = end
        visible = [KeptRun(run.start, *run.read()) for run in runs]
        if runs:
            runs[-1].settle()
        left, sinks = _seen_again(attends)
        if left >= 0:
            runs[:] = [run for run in runs if run.stop > stop - left or run.start < sinks]
        return start, visible


def _seen_again(attends: Attends) -> tuple[int, int]:
    """How many of the last positions, and of the first, later ones see; -1 and 0 if they may see all."""
    pattern = attends.pattern
    left, _ = pattern.sides(attends.causal)
    relative = pattern.layout is None and pattern.prefix == 0  # not where the positions themselves matter
    return (left, pattern.sinks) if left >= 0 and relative else (-1, 0)
