"""The 64-bit Mersenne Twister (Nishimura 2000), which numpy does not have; C++ calls it mt19937_64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_WORDS = 312
_AHEAD = 156
_LOW, _HIGH = np.uint64(0x7FFFFFFF), np.uint64(0xFFFFFFFF80000000)
_TWIST = np.uint64(0xB5026F5AA96619E9)
_MASK = (1 << 64) - 1


def mersenne_64(seed: int) -> Iterator[int]:
    """The twister's numbers for a seed, without end."""
    state = np.empty(_WORDS, dtype=np.uint64)
    value = seed & _MASK
    for i in range(_WORDS):
        state[i] = value
        value = (6364136223846793005 * (value ^ (value >> 62)) + i + 1) & _MASK
    while True:
        _turn(state)
        yield from _tempered(state).tolist()


def _turn(state: np.ndarray) -> None:
    """Make the next block, either half in one go, but for the last word: a word needs one 156 further on."""
    for begin, end, source in ((0, _AHEAD, _AHEAD), (_AHEAD, _WORDS - 1, 0)):
        mixed = (state[begin:end] & _HIGH) | (state[begin + 1 : end + 1] & _LOW)
        state[begin:end] = state[source : source + end - begin] ^ _twisted(mixed)
    last = (state[-1:] & _HIGH) | (state[:1] & _LOW)
    state[-1:] = state[_AHEAD - 1 : _AHEAD] ^ _twisted(last)


def _twisted(mixed: np.ndarray) -> np.ndarray:
    one = np.uint64(1)
    twisted: np.ndarray = (mixed >> one) ^ np.where(mixed & one, _TWIST, np.uint64(0))
    return twisted


def _tempered(state: np.ndarray) -> np.ndarray:
    x = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    x = x ^ ((x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000))
    x = x ^ ((x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000))
    tempered: np.ndarray = x ^ (x >> np.uint64(43))
    return tempered
