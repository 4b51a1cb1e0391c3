"""The generators of `ops/counter_random.py` in Python integers, which tensors must equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.ops.counter_random import MASK_64, mix_64

_MASK_32 = (1 << 32) - 1
GAMMA = 0x9E3779B97F4A7C15
KEEP_MULTIPLIER = 0x7FEB352D


def splitmix_64(seed: int, index: int) -> int:
    """The number at `index` of the SplitMix64 stream that starts at `seed`."""
    return mix_64((seed + (index + 1) * GAMMA) & MASK_64)


def splitmix_64_stream(seed: int) -> Iterator[int]:
    """The published sequential form, one state added to at a time."""
    state = seed
    while True:
        state = (state + GAMMA) & MASK_64
        yield mix_64(state)


def derive_reference(key: int, index: int) -> int:
    """A stream of its own per key: the key is mixed first, so neighbouring keys share nothing."""
    return splitmix_64(mix_64(key & MASK_64), index)


def uniform_reference(key: int, index: int) -> float:
    """The top 24 bits as a fraction of 2^24: every value is an exact fp32 number below 1."""
    return (derive_reference(key, index) >> 40) / (1 << 24)


def _signed_32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def keep_reference(key: int, p: float, index: int) -> bool:
    """Dropout's 32-bit generator: (low(row) + column) * (high(row) | 1), mixed once more.

    `row` and `column` are 64-bit mixes of key and index; the element costs two 32-bit products.
    """
    row = mix_64((key + GAMMA) & MASK_64)
    column = splitmix_64(0, index) & _MASK_32
    x = ((row + column) * ((row >> 32) | 1)) & _MASK_32
    x = ((x ^ (_signed_32(x) >> 16)) * KEEP_MULTIPLIER) & _MASK_32
    return _signed_32(x) >= round(p * (1 << 32)) - (1 << 31)
