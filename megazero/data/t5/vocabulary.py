"""The vocabulary of T5's samples: the special ids, the sentinels, and where words begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megazero.data.bert.word_pieces import CONTINUES, WordPieces
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError

_NONE = -1  # an id that no token has
_MOCK_SENTINELS = 100  # as many as T5's own vocabulary has


@dataclass(frozen=True, eq=False)
class SpanVocabulary:
    """A vocabulary with sentinels.

    words: which ids continue a word, and the special ids. start: the decoder's first input; end: its last
    label. sentinels: the ids that stand for spans that were cut out.
    """

    words: WordPieces
    start: int
    end: int
    sentinels: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Tokenizer) -> SpanVocabulary:
        """The vocabulary of a tokenizer.

        The decoder starts with the bos token, as in Megatron-LM; without a bos, with padding, as in T5.

        Raises:
            DataError: the tokenizer has no token that ends a text.
        """
        roles, pieces, size = tokenizer.special_ids, tokenizer.word_pieces() or {}, tokenizer.vocab_size
        end = roles.get("eos", tokenizer.eod)
        if end is None:
            raise DataError(
                f"`tokenizer_type` must have a token that ends a text for T5, but {tokenizer.name} has "
                "none; give a vocabulary with </s> or [EOS]."
            )
        pad = roles.get("pad", end)
        continues = np.zeros(size, dtype=bool)
        continues[[number for piece, number in pieces.items() if piece.startswith(CONTINUES)]] = True
        words = WordPieces(
            cls=roles.get("cls", _NONE),
            sep=roles.get("sep", _NONE),
            mask=roles.get("mask", _NONE),
            pad=pad,
            continues=continues,
            replacements=np.arange(size, dtype=np.int64),
        )
        return SpanVocabulary(words, roles.get("bos", pad), end, tokenizer.extra_ids)

    @staticmethod
    def numbered(size: int) -> SpanVocabulary:
        """A vocabulary for runs without a tokenizer: 0 is pad and start, 1 end, the last ids are sentinels.

        Raises DataError if no id is left for words.
        """
        if size < 4:
            raise DataError(
                f"`vocab_size` must be at least 4, for three special tokens and a word, but is {size}."
            )
        sentinels = min(_MOCK_SENTINELS, max(1, (size - 2) // 2))
        every = np.arange(size, dtype=np.int64)
        words = WordPieces(_NONE, _NONE, _NONE, 0, np.zeros(size, dtype=bool), every)
        return SpanVocabulary(words, 0, 1, tuple(range(size - 1, size - 1 - sentinels, -1)))

    @property
    def size(self) -> int:
        """One above the largest id."""
        return self.words.size

    @property
    def plain(self) -> np.ndarray:
        """int64: the ids that stand for text, ascending."""
        return np.setdiff1d(self.words.plain, (self.start, self.end, *self.sentinels))
