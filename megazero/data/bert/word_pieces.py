"""A WordPiece vocabulary, as masking reads it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError

CONTINUES = "##"  # the prefix of a piece that continues a word
_ROLES = ("cls", "sep", "mask", "pad")


@dataclass(frozen=True, eq=False)
class WordPieces:
    """The word boundaries and special tokens of a vocabulary.

    cls, sep, mask, pad: ids of the special tokens. continues: bool [largest id + 1], whether a piece
    continues a word. replacements: int64 [V], ascending, the ids that random replacements are drawn from.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    continues: np.ndarray
    replacements: np.ndarray

    @staticmethod
    def of(tokenizer: Tokenizer) -> WordPieces:
        """The vocabulary of a tokenizer; DataError if it is not a WordPiece or lacks a special token."""
        pieces = tokenizer.word_pieces()
        if pieces is None:
            raise DataError(
                f"`tokenizer_type` must be a WordPiece vocabulary, but {tokenizer.name} is none; give "
                "BertWordPieceLowerCase or BertWordPieceCase with its vocab.txt, or HFTokenizer with a "
                "tokenizer.json that holds WordPiece."
            )
        named = {role: pieces[name] for role in _ROLES if (name := f"[{role.upper()}]") in pieces}
        named |= {role: tokenizer.special_ids[role] for role in _ROLES if role in tokenizer.special_ids}
        missing = [f"[{role.upper()}]" for role in _ROLES if role not in named]
        if missing:
            raise DataError(
                "`vocabulary` must contain [CLS], [SEP], [MASK] and [PAD], but lacks "
                f"{' and '.join(missing)}; add them to it."
            )
        continues = np.zeros(tokenizer.vocab_size, dtype=bool)
        continues[[number for piece, number in pieces.items() if piece.startswith(CONTINUES)]] = True
        return WordPieces(
            cls=named["cls"],
            sep=named["sep"],
            mask=named["mask"],
            pad=named["pad"],
            continues=continues,
            replacements=np.unique(np.fromiter(pieces.values(), dtype=np.int64, count=len(pieces))),
        )

    @staticmethod
    def numbered(size: int) -> WordPieces:
        """A vocabulary for runs without a tokenizer: ids 0..4 are `[PAD] [UNK] [CLS] [SEP] [MASK]`.

        Raises DataError if no id is left for words.
        """
        if size < 6:
            raise DataError(
                f"`vocab_size` must be at least 6, for five special tokens and a word, but is {size}."
            )
        every = np.arange(size, dtype=np.int64)
        return WordPieces(
            cls=2, sep=3, mask=4, pad=0, continues=np.zeros(size, dtype=bool), replacements=every
        )

    @property
    def size(self) -> int:
        """One above the largest id."""
        return self.continues.size

    @property
    def specials(self) -> np.ndarray:
        """int64 [4]: the ids of [CLS], [SEP], [MASK] and [PAD]."""
        return np.array([self.cls, self.sep, self.mask, self.pad], dtype=np.int64)

    @property
    def plain(self) -> np.ndarray:
        """The ids of other tokens than `specials`, int64, ascending. Raises DataError if there are none."""
        ids = np.setdiff1d(self.replacements, self.specials)
        if not ids.size:
            raise DataError(
                f"`vocabulary` must hold words, but its {self.replacements.size} ids are special tokens."
            )
        return ids

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary, in hex."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.specials, self.replacements):
            digest.update(array.astype("<i8").tobytes())
        digest.update(self.continues.tobytes())
        return digest.hexdigest()
