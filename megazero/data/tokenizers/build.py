"""Builds a tokenizer from `--tokenizer-type`, `--vocab-file`, `--merge-file`, `--tokenizer-model`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.library import load_gpt2_bpe, load_tokenizer_json
from megazero.data.tokenizers.sentence_piece import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from megazero.data.tokenizers.simple import ByteLevelTokenizer, NullTokenizer
from megazero.data.tokenizers.wordpiece import load_wordpiece
from megazero.errors import DataError
from megazero.storage.cached import Cache


@dataclass(frozen=True)
class TokenizerSpec:
    """The choice of a tokenizer by Megatron's flags; it can be pickled.

    kind: `--tokenizer-type`; vocab_file, merge_file, model: `--vocab-file`, `--merge-file`,
    `--tokenizer-model`; vocab_size: NullTokenizer needs it, for other kinds it must agree with the files if
    given; extra_ids: `--vocab-extra-ids`, sentinels after the vocabulary, for WordPiece and
    SentencePieceTokenizer only; wordpiece_first: `--wordpiece-first`.
    """

    kind: str
    vocab_file: str | None = None
    merge_file: str | None = None
    model: str | None = None
    vocab_size: int | None = None
    extra_ids: int = 0
    wordpiece_first: str = "bos"


def _tokenizer_json(spec: TokenizerSpec) -> Tokenizer:
    return load_tokenizer_json(spec.model, spec.kind)


def _bert(spec: TokenizerSpec) -> Tokenizer:
    return load_wordpiece(spec.vocab_file, spec.kind, spec.extra_ids, first=spec.wordpiece_first)


@dataclass(frozen=True)
class _TokenizerKind:
    make: Callable[[TokenizerSpec], Tokenizer]
    has_extra_ids: bool = False
    needs_vocab_size: bool = False


_KINDS = MappingProxyType(
    {
        "GPT2BPETokenizer": _TokenizerKind(lambda spec: load_gpt2_bpe(spec.vocab_file, spec.merge_file)),
        "HFTokenizer": _TokenizerKind(_tokenizer_json),
        "HuggingFaceTokenizer": _TokenizerKind(_tokenizer_json),
        "TokenizerJson": _TokenizerKind(_tokenizer_json),
        "SentencePieceTokenizer": _TokenizerKind(
            lambda spec: SentencePieceTokenizer(spec.model, spec.extra_ids), has_extra_ids=True
        ),
        "GPTSentencePieceTokenizer": _TokenizerKind(lambda spec: GPTSentencePieceTokenizer(spec.model)),
        "Llama2Tokenizer": _TokenizerKind(lambda spec: Llama2Tokenizer(spec.model)),
        "BertWordPieceLowerCase": _TokenizerKind(_bert, has_extra_ids=True),
        "BertWordPieceCase": _TokenizerKind(_bert, has_extra_ids=True),
        "ByteLevelTokenizer": _TokenizerKind(lambda spec: ByteLevelTokenizer()),
        "NullTokenizer": _TokenizerKind(lambda spec: NullTokenizer(spec.vocab_size), needs_vocab_size=True),
    }
)

TOKENIZER_KINDS: tuple[str, ...] = tuple(_KINDS)
"""The values `--tokenizer-type` accepts."""


def build_tokenizer(spec: TokenizerSpec, cache: Cache | None = None) -> Tokenizer:
    """Build a tokenizer. Raises DataError if a file is missing or unsuitable, or if a value is not used.

    cache: where files at URLs are copied to; None for the user's cache folder.
    """
    kind = _KINDS.get(spec.kind)
    if kind is None:
        near = difflib.get_close_matches(spec.kind, TOKENIZER_KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(TOKENIZER_KINDS)}."
        raise DataError(f"`tokenizer_type` must be a known tokenizer, but is {spec.kind}; {hint}")
    if spec.extra_ids < 0:
        raise DataError(f"`vocab_extra_ids` must be at least 0, but is {spec.extra_ids}.")
    if spec.extra_ids and not kind.has_extra_ids:
        users = ", ".join(name for name, row in _KINDS.items() if row.has_extra_ids)
        raise DataError(
            f"`vocab_extra_ids` must be 0 with {spec.kind}, but is {spec.extra_ids}; "
            f"it is read by {users} only."
        )
    tokenizer = kind.make((cache or Cache()).local(spec, "vocab_file", "merge_file", "model"))
    if not kind.needs_vocab_size and spec.vocab_size not in (None, tokenizer.vocab_size):
        raise DataError(
            f"`vocab_size` must be {tokenizer.vocab_size}, the size of this {spec.kind}'s vocabulary, "
            f"but is {spec.vocab_size}; leave the flag out or give the files it belongs to."
        )
    return tokenizer
