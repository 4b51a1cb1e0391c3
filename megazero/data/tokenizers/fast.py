"""Encoding by gigatoken, if it is installed, supports the tokenizer and gives the same ids.

gigatoken (MIT) encodes byte-level BPE about a hundred times faster than the `tokenizers` library. It is
optional and never trusted blindly: callers compare a sample of every run by `first_difference`, and use the
tokenizer itself if the two disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megazero.data.tokenizers.base import TokenBatch, Tokenizer, is_failure

# A batch call is faster only for more texts than this, and its first use imports a large library (0.25 s).
_ONE_BY_ONE = 4096
_PROBED = (*range(0xD800), *range(0xE000, 0x10000))  # the code points below 2^16 without surrogates


class FastEncoder:
    """Encodes batches on the calling thread to the same ids as `tokenizer`.

    backend: a `gigatoken.Tokenizer`, which has no type annotations. Texts that contain a `reserved` string
    are encoded by `tokenizer` itself.
    """

    name = "gigatoken"

    def __init__(self, backend: Any, tokenizer: Tokenizer, reserved: tuple[str, ...]):
        self._backend = backend
        self._tokenizer = tokenizer
        self._reserved = reserved

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """The ids of several plain texts."""
        if not self._reserved:
            return self._encode(texts)
        batches, start = [], 0
        for i, text in enumerate(texts):
            if any(word in text for word in self._reserved):
                batches += [self._encode(texts[start:i]), self._tokenizer.encode_batch([text])]
                start = i + 1
        batches.append(self._encode(texts[start:]))
        ids = np.concatenate([batch.ids for batch in batches])
        return TokenBatch(ids, np.concatenate([batch.lengths for batch in batches]))

    def _encode(self, texts: Sequence[str]) -> TokenBatch:
        if not texts:
            return TokenBatch(np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
        if len(texts) <= _ONE_BY_ONE:
            rows = [self._backend.encode(text) for text in texts]
            lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
            return TokenBatch(np.concatenate(rows), lengths)
        layout = self._backend.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        return TokenBatch(np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets))


class FastChoice(NamedTuple):
    """encoder: None if there is none. reason: why there is none; None if this kind never has one."""

    encoder: FastEncoder | None
    reason: str | None


def try_fast(tokenizer: Tokenizer) -> FastChoice:
    """A fast encoder for this tokenizer, or the reason why there is none."""
    source = tokenizer.fast_source()
    if source is None:
        return FastChoice(None, None)
    try:
        import gigatoken
    except ImportError:
        return FastChoice(None, "gigatoken is not installed (pip install gigatoken)")
    try:
        if source.form == "sentencepiece":
            backend = gigatoken.Tokenizer.from_sentencepiece(source.data)
        else:
            backend = gigatoken.Tokenizer.from_json(source.data)
    except BaseException as error:  # gigatoken supports fewer tokenizers, and may panic
        if not is_failure(error):
            raise
        return FastChoice(None, f"gigatoken does not support this tokenizer ({error})")
    encoder = FastEncoder(backend, tokenizer, source.reserved)
    if source.normalizes:
        # Normalization may differ for letters too rare to be in a sample, such as U+0085: probe them all.
        probes = [text for code in _PROBED for text in (chr(code), f"a{chr(code)} {chr(code)}b")]
        different = first_difference(encoder, tokenizer, probes)
        if different is not None:
            text = ascii(probes[different])
            return FastChoice(None, f"gigatoken gives other ids than {tokenizer.name} on {text}")
    return FastChoice(encoder, None)


def first_difference(fast: FastEncoder, tokenizer: Tokenizer, texts: Sequence[str]) -> int | None:
    """The number of the first text that the two encode to different ids; None if they agree on all texts."""
    quick, slow = fast.encode_batch(texts), tokenizer.encode_batch(texts)
    for number, (a, b) in enumerate(zip(quick.rows(), slow.rows(), strict=True)):
        if not np.array_equal(a, b):
            return number
    return None
