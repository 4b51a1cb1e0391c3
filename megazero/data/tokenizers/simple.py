"""Tokenizers without files: raw bytes, and text that consists of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megazero.data.tokenizers.base import TokenBatch, Tokenizer
from megazero.errors import DataError


class ByteLevelTokenizer(Tokenizer):
    """Each UTF-8 byte is its own id; 256 ends a document."""

    name = "ByteLevelTokenizer"
    vocab_size = 257
    eod = 256

    def __init__(self) -> None:
        self.special_ids = {"eos": 256}

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        rows = [text.encode("utf-8") for text in texts]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        return TokenBatch(np.frombuffer(b"".join(rows), dtype=np.uint8), lengths)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 (a document cut inside a letter) become U+FFFD."""
        parts, run = [], bytearray()
        for i in ids:
            if 0 <= i < 256:
                run.append(i)
                continue
            if i != self.eod:
                raise DataError(f"token ids must be in 0..256, but one is {i}; is it another vocabulary's?")
            parts += [run.decode("utf-8", errors="replace"), "<|endoftext|>"]
            run = bytearray()
        return "".join([*parts, run.decode("utf-8", errors="replace")])


class NullTokenizer(Tokenizer):
    """Texts are decimal token ids, separated by whitespace. `eod` is `vocab_size`, as in Megatron."""

    name = "NullTokenizer"
    eod: int

    def __init__(self, vocab_size: int | None):
        if vocab_size is None or vocab_size < 1:
            raise DataError(
                f"`vocab_size` must be a positive number for NullTokenizer, but is {vocab_size}; set it."
            )
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1
        self.special_ids = {"eos": vocab_size}

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < self.eod):
                raise DataError(
                    f"text must be ids in 0..{self.eod - 1} for NullTokenizer, but has {word[:40]!r}."
                )
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)
