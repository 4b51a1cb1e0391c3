"""Encodes texts word by word, each different word once, for tokenizers to which words are strangers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from megazero.data.tokenizers.base import TokenBatch

_MOST_WORDS = 1 << 20
_LONGEST_WORD = 64

Encode = Callable[[Sequence[str]], TokenBatch]


class WordCache:
    """Gives the ids of whole texts from those of their words, and remembers the words.

    For tokenizers whose ids of a text are those of its words (as `str.split` finds them) in a row, and whose
    ids of a word are those of its parts. Memory is bounded: unusually long words are not kept, and past a
    million words all are forgotten.

    `encode` gives the ids of each of some parts; `parts` divides a word.
    """

    def __init__(self, encode: Encode, parts: Callable[[str], list[str]]):
        self._encode = encode
        self._parts = parts
        self._words: dict[str, tuple[int, ...]] = {}
        self._known_parts: dict[str, tuple[int, ...]] = {}

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """The ids of several texts."""
        words = [text.split() for text in texts]
        known = self._look_up(set(chain.from_iterable(words)))
        rows = [list(chain.from_iterable(map(known.__getitem__, row))) for row in words]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
        return TokenBatch(ids, lengths)

    def _look_up(self, words: set[str]) -> dict[str, tuple[int, ...]]:
        """A table that holds all these words and maybe others."""
        if len(self._words) > _MOST_WORDS:
            self._words, self._known_parts = {}, {}
        missing = {word: self._parts(word) for word in words - self._words.keys()}
        if not missing:
            return self._words
        parts = self._look_up_parts(set(chain.from_iterable(missing.values())))
        new = {word: tuple(chain.from_iterable(map(parts.__getitem__, own))) for word, own in missing.items()}
        return _remember(self._words, new)

    def _look_up_parts(self, parts: set[str]) -> dict[str, tuple[int, ...]]:
        missing = list(parts - self._known_parts.keys())
        rows = self._encode(missing).rows()
        new = {part: tuple(row.tolist()) for part, row in zip(missing, rows, strict=True)}
        return _remember(self._known_parts, new)


def _remember(
    table: dict[str, tuple[int, ...]], new: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Put what is not too long into the table; returns one that holds everything."""
    usual = {word: ids for word, ids in new.items() if len(word) <= _LONGEST_WORD}
    table.update(usual)
    return table if len(usual) == len(new) else table | new
