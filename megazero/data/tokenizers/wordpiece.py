"""BERT's WordPiece (Devlin et al. 2018) from a vocab.txt, run by the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from megazero.data.tokenizers.base import FastSource, TokenBatch, require_file
from megazero.data.tokenizers.library import LibraryTokenizer, check_ids
from megazero.errors import DataError

if TYPE_CHECKING:
    import tokenizers

_ROLES = MappingProxyType({"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]"})
# Google's WordPiece gives up on words longer than this; the library's own default is 100.
_LONGEST_WORD = 200
_MOST_CACHED_WORDS = 1 << 20
_LONGEST_CACHED_WORD = 64
_ASCII_PARTS = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9]")
_REMOVED = re.compile(r"[\x0b\x0c\x1c-\x1f\x85]")


class WordPieceTokenizer(LibraryTokenizer):
    """WordPiece plus the tokens that Megatron appends: [BOS] and [EOS] if absent, then `<extra_id_0>` ..."""

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
        # BERT splits text at whitespace and encodes each word by itself. It removes some characters that
        # Python's `split` takes for whitespace, which joins the letters around them.
        return self._words.encode_batch([_REMOVED.sub("", text) for text in texts])

    def _encode_parts(self, parts: Sequence[str]) -> TokenBatch:
        # The normalizer only lower-cases a part in ASCII, and the pre-tokenizer leaves such a part whole.
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
    """Split a word as BERT's pre-tokenizer does: runs of letters and digits, and single other characters."""
    return _ASCII_PARTS.findall(word) if _is_plain(word) else [word]


def _is_plain(word: str) -> bool:
    return word.isascii() and word.isprintable()


def load_wordpiece(
    vocab_file: str | None, kind: str, extra_ids: int, *, first: str = "bos"
) -> WordPieceTokenizer:
    """Load BERT's vocab.txt; with `kind` BertWordPieceLowerCase, text is lower-cased and loses its accents.

    first: which of "bos" and "eos" is appended first.
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


class WordCache:
    """Encodes each different word of the texts once, and remembers its ids.

    For tokenizers whose ids of a text are the ids of its words (by `str.split`), concatenated, and whose ids
    of a word are the ids of its parts, concatenated. Memory is bounded: long words are not kept, and the
    cache is emptied when it holds more than a million words.

    encode: encodes some parts; split: splits a word into parts.
    """

    def __init__(self, encode: Callable[[Sequence[str]], TokenBatch], split: Callable[[str], list[str]]):
        self._encode = encode
        self._split = split
        self._words: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, tuple[int, ...]] = {}

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """The ids of several texts."""
        words = [text.split() for text in texts]
        known = self._look_up(set(chain.from_iterable(words)))
        rows = [list(chain.from_iterable(map(known.__getitem__, row))) for row in words]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
        return TokenBatch(ids, lengths)

    def _look_up(self, words: set[str]) -> dict[str, tuple[int, ...]]:
        """The ids of these words, and maybe of others."""
        if len(self._words) > _MOST_CACHED_WORDS:
            self._words, self._parts = {}, {}
        missing = {word: self._split(word) for word in words - self._words.keys()}
        if not missing:
            return self._words
        parts = self._look_up_parts(set(chain.from_iterable(missing.values())))
        new = {word: tuple(chain.from_iterable(map(parts.__getitem__, own))) for word, own in missing.items()}
        return _remember(self._words, new)

    def _look_up_parts(self, parts: set[str]) -> dict[str, tuple[int, ...]]:
        missing = list(parts - self._parts.keys())
        rows = self._encode(missing).rows()
        new = {part: tuple(row.tolist()) for part, row in zip(missing, rows, strict=True)}
        return _remember(self._parts, new)


def _remember(
    table: dict[str, tuple[int, ...]], new: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Add the words that are not too long to `table`; return a table with all words."""
    short = {word: ids for word, ids in new.items() if len(word) <= _LONGEST_CACHED_WORD}
    table.update(short)
    return table if len(short) == len(new) else table | new
