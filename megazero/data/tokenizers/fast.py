"""The quick lane: gigatoken, where it is installed, supports the tokenizer and gives the same ids.

gigatoken (MIT) encodes byte-level BPE some hundred times faster than the `tokenizers` library. It is optional
and never trusted blindly: callers compare a sample of every run with `first_difference` and go back to the
tokenizer itself where the two disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megazero.data.tokenizers.base import TokenBatch, Tokenizer


@dataclass(frozen=True)
class FastSource:
    """What a tokenizer hands over: `form` is "tokenizer.json" or "sentencepiece", `data` the file's bytes."""

    form: str
    data: bytes


class FastEncoder:
    """Encodes batches on the calling thread; the ids are those of the tokenizer it was made for."""

    def __init__(self, backend: Any):
        self._backend = backend

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """The ids of several plain texts."""
        if not texts:
            return TokenBatch(np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
        layout = self._backend.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        return TokenBatch(np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets))


class FastChoice(NamedTuple):
    """`encoder` is None where there is no quick lane; `reason` then says why, in words for the user."""

    encoder: FastEncoder | None
    reason: str


def try_fast(tokenizer: Tokenizer) -> FastChoice:
    """A fast encoder for this tokenizer, or the reason why there is none."""
    source = tokenizer.fast_source()
    if source is None:
        return FastChoice(None, f"{tokenizer.name} has no fast form")
    try:
        import gigatoken
    except ImportError:
        return FastChoice(None, "gigatoken is not installed (pip install gigatoken)")
    try:
        if source.form == "sentencepiece":
            backend = gigatoken.Tokenizer.from_sentencepiece(source.data)
        else:
            backend = gigatoken.Tokenizer.from_json(source.data)
    except Exception as error:  # whatever it does not support, the tokenizer itself still does
        return FastChoice(None, f"gigatoken does not support this tokenizer ({error})")
    return FastChoice(FastEncoder(backend), "gigatoken")


def first_difference(fast: FastEncoder, tokenizer: Tokenizer, texts: Sequence[str]) -> int | None:
    """The number of the first text to which the two give different ids, or None if they agree on all."""
    quick, slow = fast.encode_batch(texts), tokenizer.encode_batch(texts)
    for number, (a, b) in enumerate(zip(quick.rows(), slow.rows(), strict=True)):
        if not np.array_equal(a, b):
            return number
    return None
