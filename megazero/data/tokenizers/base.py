"""The interface that every tokenizer has.

One rule holds for all kinds: **a document is plain text**. A document that contains the letters
`<|endoftext|>` (or `</s>`, `[MASK]`, ...) is encoded as these letters and never as the special id, so no text
can forge an end of document. Megatron's GPT-2 tokenizer and tiktoken's `encode_ordinary` do the same; the
`tokenizers` library does it on request. Nothing is added around the text either (no BOS, no [CLS]): the code
that builds samples adds what the model needs.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.errors import DataError
from megazero.regular_file import read_regular


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of several texts, concatenated.

    ids: [total tokens], of any integer type; lengths: int64 [texts], which sum to len(ids).
    """

    ids: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(rows: Sequence[Sequence[int] | np.ndarray]) -> TokenBatch:
        """Concatenate the ids of several texts."""
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        ids = np.empty(int(lengths.sum()), dtype=np.int64)
        end = 0
        for row in rows:
            start, end = end, end + len(row)
            ids[start:end] = row
        return TokenBatch(ids, lengths)

    def rows(self) -> list[np.ndarray]:
        """The ids of each text, as views."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


@dataclass(frozen=True)
class FastSource:
    """A tokenizer's file for a fast encoder.

    form: "tokenizer.json" or "sentencepiece"; data: the bytes of the file; reserved: strings that gigatoken
    would read as special tokens, although a document means the letters; normalizes: whether text is changed
    before it is split into tokens.
    """

    form: str
    data: bytes
    reserved: tuple[str, ...] = ()
    normalizes: bool = False


def is_failure(error: BaseException) -> bool:
    """Whether `error` is a failure of a library, rather than a request to exit.

    A panic in Rust code is not an `Exception` but a BaseException.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Tokenizer(ABC):
    """Text to ids and back.

    name: the kind; vocab_size: the largest id + 1, without padding; eod: the id that ends a document, None if
    the vocabulary has no such id; special_ids: the ids of the roles that exist ("bos", "eos", "pad", "cls",
    "sep", "mask", "unk").
    """

    name: str
    vocab_size: int
    eod: int | None
    special_ids: Mapping[str, int]
    extra_ids: tuple[int, ...] = ()  # the ids of the sentinels `<extra_id_0>`, `<extra_id_1>`, ...

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of one plain text. Raises DataError if the text has no ids (NullTokenizer)."""

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """The ids of several plain texts; for each text those of `encode`."""
        return TokenBatch.of([self.encode(text) for text in texts])

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, with special tokens by name; DataError for ids outside the vocabulary."""

    def word_pieces(self) -> Mapping[str, int] | None:
        """Tokens, as a WordPiece vocabulary spells them, to ids; None if this is not a WordPiece."""
        return None

    def fast_source(self) -> FastSource | None:
        """The file that a fast encoder can be built from; None if this kind has no fast encoder."""
        return None


def require_file(path: str | None, flag: str, kind: str, content: str) -> Path:
    """`path` as a Path. Raises DataError, naming `flag`, unless it is a file.

    kind: the tokenizer that needs the file; content: what the file must hold; both are for the message.
    """
    if path is None:
        raise DataError(f"`{flag}` must name {content} for {kind}, but is missing; add `{flag} FILE`.")
    file = Path(path)
    if not file.is_file():
        what = "a directory" if file.is_dir() else "not a regular file" if file.exists() else "not there"
        raise DataError(f"`{flag}` must name {content} for {kind}, but {path} is {what}; correct `{flag}`.")
    return file


def read_json(path: Path, flag: str) -> object:
    """The parsed content of a JSON file. Raises DataError, naming `flag` and the file."""
    try:
        return json.loads(read_regular(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{flag}` must be a JSON file, but {path} is not ({error}).") from error
    except OSError as error:
        raise DataError(f"`{flag}` must be readable, but {path} is not ({error}).") from error
