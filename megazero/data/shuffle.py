"""The order of a cyclic training: which sample of the data stands at each position, epoch after epoch.

The order of an epoch is a keyed permutation that is computed where it is asked for: nothing is shuffled or
stored, whatever the size of the data, and the order is a function of (seed, position) on every machine and
with every version of the libraries. The permutation is a Feistel network over the next power of two (Luby &
Rackoff 1988); what it takes out of the range goes through it again until it is back (cycle walking, Black &
Rogaway 2002).
"""

from __future__ import annotations

import hashlib
import struct

# Fewer leave neighbours that can be told from random ones in data of some ten samples.
_ROUNDS = 16
_MASK = (1 << 64) - 1


def cyclic_sample(position: int, num_samples: int, seed: int) -> int:
    """The sample at `position` of an endless order, in which each `num_samples` positions are an epoch.

    An epoch holds each of the samples 0 to num_samples - 1 once, in an order of its own.
    """
    epoch, place = divmod(position, num_samples)
    keys = _round_keys(seed, epoch)
    bits = max(1, (num_samples - 1).bit_length())
    sample = _network(place, bits, keys)
    while sample >= num_samples:
        sample = _network(sample, bits, keys)
    return sample


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """The keys of the permutation of one epoch."""
    return struct.unpack(f"<{_ROUNDS}Q", hashlib.shake_128(f"{seed} {epoch}".encode()).digest(8 * _ROUNDS))


def _network(value: int, bits: int, keys: tuple[int, ...]) -> int:
    """A permutation of all numbers of `bits` bits: each round changes one half by the other."""
    width = bits - bits // 2  # of the low half, which has the odd bit
    low_mask, high_mask = (1 << width) - 1, (1 << bits // 2) - 1
    high, low = value >> width, value & low_mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        low ^= _mixed(high, first) & low_mask
        high ^= _mixed(low, second) & high_mask
    return high << width | low


def _mixed(value: int, key: int) -> int:
    """64 random bits for each value: SplitMix64's output function (Steele, Lea & Flood 2014)."""
    mixed = (value * 0x9E3779B97F4A7C15 + key) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
