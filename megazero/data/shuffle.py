"""The order of samples in a cyclic training, epoch after epoch.

The order of an epoch is a keyed permutation that is computed position by position: nothing is shuffled or
stored, whatever the size of the data, and the order is the same function of (seed, position) on every machine
and with every version of the libraries. The permutation is a Feistel network over the next power of two (Luby
& Rackoff 1988); a result outside the range goes through the network again until it lies inside (cycle
walking, Black & Rogaway 2002).
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from megazero.data.native import NATIVE

_ROUNDS = 16  # with fewer, the order of about ten samples can be told from a random one
_MASK = (1 << 64) - 1


def cyclic_sample(position: int, num_samples: int, seed: int) -> int:
    """The sample at `position` of an endless order.

    Every `num_samples` positions are an epoch, which has each of the samples 0..num_samples-1 once, in an
    order of its own.
    """
    epoch, place = divmod(position, num_samples)
    return _permuted(place, num_samples, _keys(f"{seed} {epoch}"))


def permuted(places: np.ndarray, count: int, key: str) -> np.ndarray:
    """The numbers at some places, int64 [n], of the permutation of 0..count-1 that `key` names, int64 [n].

    Epochs of `cyclic_sample` have the keys "SEED EPOCH".
    """
    keys = _keys(key)
    if NATIVE is None:
        return np.array([_permuted(place, count, keys) for place in places.tolist()], dtype=np.int64)
    numbers: np.ndarray = NATIVE.permuted(places, count, keys)
    return numbers


def _keys(text: str) -> tuple[int, ...]:
    return struct.unpack(f"<{_ROUNDS}Q", hashlib.shake_128(text.encode()).digest(8 * _ROUNDS))


def _permuted(place: int, count: int, keys: tuple[int, ...]) -> int:
    bits = max(1, (count - 1).bit_length())
    number = _network(place, bits, keys)
    while number >= count:
        number = _network(number, bits, keys)
    return number


def _network(value: int, bits: int, keys: tuple[int, ...]) -> int:
    """Permute the numbers of `bits` bits: each round xors one half with a hash of the other half."""
    width = bits - bits // 2  # of the low half; it has one bit more if `bits` is odd
    low_mask, high_mask = (1 << width) - 1, (1 << bits // 2) - 1
    high, low = value >> width, value & low_mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        low ^= _mixed(high, first) & low_mask
        high ^= _mixed(low, second) & high_mask
    return high << width | low


def _mixed(value: int, key: int) -> int:
    """Hash `value` to 64 bits by the output function of SplitMix64 (Steele, Lea & Flood 2014)."""
    mixed = (value * 0x9E3779B97F4A7C15 + key) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
