"""Keys and values of earlier positions, so that each generated token takes the work of one position."""

from __future__ import annotations

from torch import Tensor

from megazero.errors import ConfigError
from megazero.layers.cores import KeyValueStore


class KeyValueCache(KeyValueStore):
    """Keys and values in preallocated memory.

    A layer's buffers, [max_length, b, g/tp, d] each, are allocated at its first `extend` and take their
    shape, dtype and device from the tensors given, so the cache works for any model and any slice of it.

    Args:
        max_length: number of positions that fit.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def length(self) -> int:
        """Number of positions that every layer holds."""
        return min(self._lengths.values(), default=0)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g/tp, d] for `layer` and return all positions so far, as views [t, b, g/tp, d].

        Raises:
            ConfigError: there are more positions than fit.
        """
        start = self._lengths.get(layer, 0)
        stop = start + key.shape[0]
        if stop > self.max_length:
            raise ConfigError(
                f"`max_length` of the key-value cache must be at least {stop}, but is {self.max_length}; "
                f"make a longer cache or generate fewer tokens"
            )
        if layer not in self._buffers:
            self._buffers[layer] = self._buffer(key), self._buffer(value)
        keys, values = self._buffers[layer]
        keys[start:stop] = key
        values[start:stop] = value
        self._lengths[layer] = stop
        return keys[:stop], values[:stop]

    def _buffer(self, x: Tensor) -> Tensor:
        return x.new_empty(self.max_length, *x.shape[1:])
