"""The interface that every tokenizer has.

One rule holds for all kinds: **a document is plain text**. A document that happens to contain the letters
`<|endoftext|>` (or `</s>`, `[MASK]`, ...) is encoded as these letters and never as the special id, so no text
can forge an end of document. This is what Megatron's GPT-2 tokenizer and tiktoken's `encode_ordinary` do; the
`tokenizers` library does it on request. Nothing is added around the text either (no BOS, no [CLS]): whoever
builds samples adds what the model needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of several texts, one after the other.

    `ids` [total tokens], an unsigned or signed integer array; `lengths` int64 [texts], summing to len(ids).
    """

    ids: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(rows: Sequence[Sequence[int] | np.ndarray]) -> TokenBatch:
        """The batch of these id lists."""
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        ids = np.empty(int(lengths.sum()), dtype=np.int64)
        end = 0
        for row in rows:
            start, end = end, end + len(row)
            ids[start:end] = row
        return TokenBatch(ids, lengths)

    def rows(self) -> list[np.ndarray]:
        """One view of `ids` per text."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


@dataclass(frozen=True)
class FastSource:
    """A tokenizer's file for a fast encoder: `form` is "tokenizer.json" or "sentencepiece", `data` its bytes.

    `reserved` are strings that gigatoken would read as special tokens although a document means the letters;
    `normalizes` says that text is changed before it is split into tokens.
    """

    form: str
    data: bytes
    reserved: tuple[str, ...] = ()
    normalizes: bool = False


def is_failure(error: BaseException) -> bool:
    """Whether a library failed, and nobody asks the process to end. Panics of Rust are no `Exception`s."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Tokenizer(ABC):
    """Text to ids and back.

    `name` is the kind; `vocab_size` counts every id the tokenizer knows (one above the largest, unpadded);
    `eod` is the id which ends a document, or None where the vocabulary has none; `special_ids` maps the roles
    that exist ("bos", "eos", "pad", "cls", "sep", "mask", "unk") to ids.
    """

    name: str
    vocab_size: int
    eod: int | None
    special_ids: Mapping[str, int]
    extra_ids: tuple[int, ...] = ()  # the ids of `<extra_id_0>` and so on, sentinels that no text has

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of one plain text. Raises DataError where the text has none (NullTokenizer)."""

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """The ids of several plain texts; the same as `encode` gives for each."""
        return TokenBatch.of([self.encode(text) for text in texts])

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text for these ids, special tokens by name. Raises DataError on ids outside the vocabulary."""

    def word_pieces(self) -> Mapping[str, int] | None:
        """Each token as a WordPiece vocabulary spells it, and its id; None if this is no WordPiece."""
        return None

    def fast_source(self) -> FastSource | None:
        """The form that a fast encoder can be built from, or None if this kind has none."""
        return None
