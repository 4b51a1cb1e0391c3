"""BERT's WordPiece (Devlin et al. 2018) from a vocab.txt, run by the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from megazero.data.tokenizers.base import FastSource, TokenBatch
from megazero.data.tokenizers.files import require_file
from megazero.data.tokenizers.library import LibraryTokenizer, check_ids
from megazero.data.tokenizers.word_cache import WordCache
from megazero.errors import DataError

if TYPE_CHECKING:
    import tokenizers

_ROLES = MappingProxyType({"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"})
# Google's WordPiece gives up on words longer than this; the library's own default is 100.
_LONGEST_WORD = 200
_ASCII_PARTS = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9]")
_REMOVED = re.compile(r"[\x0b\x0c\x1c-\x1f\x85]")


class WordPieceTokenizer(LibraryTokenizer):
    """WordPiece plus the ids Megatron appends: [BOS], then [EOS] where absent, then `<extra_id_0>` ..."""

    def __init__(
        self,
        name: str,
        backend: tokenizers.Tokenizer,
        special_ids: dict[str, int],
        appended: Sequence[str],
        source: Path,
    ):
        vocab_size = backend.get_vocab_size(with_added_tokens=True)
        super().__init__(name, backend, vocab_size, special_ids, None, source)
        self._appended = tuple(appended)
        self._own_size = vocab_size
        self.vocab_size += len(appended)
        first = len(appended) - sum(token.startswith("<extra_id_") for token in appended)
        self.extra_ids = tuple(range(vocab_size + first, self.vocab_size))
        self._lowercases = name == "BertWordPieceLowerCase"
        self._words = WordCache(self._encode_parts, _parts)

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        # BERT separates words at whitespace and looks at each by itself. Some characters that Python takes
        # for whitespace it removes, which joins what they separate.
        return self._words.encode_batch([_REMOVED.sub("", text) for text in texts])

    def _encode_parts(self, parts: Sequence[str]) -> TokenBatch:
        # To a part in ASCII the normalizer does nothing but this, and the other steps nothing at all.
        model = self._backend.model
        rows: dict[str, list[int] | np.ndarray] = {}
        for part in filter(_is_plain, parts):
            rows[part] = [token.id for token in model.tokenize(part.lower() if self._lowercases else part)]
        others = [part for part in parts if part not in rows]
        rows |= zip(others, super().encode_batch(others).rows(), strict=True)
        return TokenBatch.of([rows[part] for part in parts])

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(i) for i in ids]
        check_ids(ids, self.vocab_size)
        words, run = [], []
        for i in ids:
            if i < self._own_size:
                run.append(i)
                continue
            words += [super().decode(run)] if run else []
            words.append(self._appended[i - self._own_size])
            run = []
        words += [super().decode(run)] if run else []
        return " ".join(words)

    def word_pieces(self) -> Mapping[str, int]:
        appended = {token: self._own_size + i for i, token in enumerate(self._appended)}
        return {**self._backend.get_vocab(with_added_tokens=True), **appended}

    def fast_source(self) -> FastSource | None:
        return None


def _parts(word: str) -> list[str]:
    """Divide a word as BERT does before it looks for pieces: runs of letters and digits, and single signs."""
    return _ASCII_PARTS.findall(word) if _is_plain(word) else [word]


def _is_plain(word: str) -> bool:
    return word.isascii() and word.isprintable()


def load_wordpiece(
    vocab_file: str | None, kind: str, extra_ids: int, *, first: str = "bos"
) -> WordPieceTokenizer:
    """The tokenizer of this vocab.txt; lower-cases and strips accents if `kind` is BertWordPieceLowerCase.

    `first`: which of `bos` and `eos` is appended before the other.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    path = require_file(vocab_file, "vocab_file", kind, "BERT's vocab.txt")
    try:
        words = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"`vocab_file` must be UTF-8 text, but {path} is not ({error}).") from error
    words = [word.strip() for word in (words[:-1] if words[-1] == "" else words)]
    vocab = {word: i for i, word in enumerate(words)}
    if len(vocab) != len(words):
        twice = next(word for i, word in enumerate(words) if vocab[word] != i)
        raise DataError(f"`vocab_file` must name each token once, but {path} repeats {twice!r}.")
    missing = [token for token in _ROLES.values() if token not in vocab]
    if missing:
        raise DataError(
            f"`vocab_file` must contain {', '.join(missing)}, but {path} does not; give BERT's vocab.txt."
        )
    model = models.WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=kind == "BertWordPieceLowerCase")
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    ends = ("[BOS]", "[EOS]") if first == "bos" else ("[EOS]", "[BOS]")
    appended = [token for token in ends if token not in vocab]
    appended += [f"<extra_id_{i}>" for i in range(extra_ids)]
    ids = {**vocab, **{token: len(vocab) + i for i, token in enumerate(appended)}}
    roles = {**_ROLES, "bos": "[BOS]", "eos": "[EOS]"}
    special_ids = {role: ids[token] for role, token in roles.items()}
    return WordPieceTokenizer(kind, backend, special_ids, appended, path)
