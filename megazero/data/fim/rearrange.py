"""What fill-in-the-middle makes of a document (Bavarian et al. 2022).

A text is cut in prefix, middle and suffix at two places, and becomes one of two with the same tokens:

    PSM: <prefix> prefix <suffix> suffix <middle> middle
    SPM: <prefix> <suffix> suffix <middle> prefix middle

The three marks take the places of its last three tokens, so that it keeps its length, and the samples of an
index their boundaries. Cuts lie between tokens: what the file holds is neither decoded nor encoded again.
Everything is drawn from a hash of the seed, the document and its turn, so a document is the same for
whichever rank or thread reads it, and however much of it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megazero.config.fim import FimConfig
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError

_MARKS = 3
_WORD = 1 << 64


@dataclass(frozen=True)
class Infill:
    """The settings, with tokens as ids.

    prefix, middle, suffix: the marks; eod: the token between documents; split: the token between fragments;
    is_left: whether a text, given by its first tokens, is left alone.
    """

    seed: int
    rate: float
    spm_rate: float
    fragment_rate: float
    prefix: int
    middle: int
    suffix: int
    eod: int | None
    split: int | None = None
    no_prefix: str | None = None
    is_left: Callable[[np.ndarray], bool] | None = None

    @property
    def description(self) -> dict[str, object]:
        """What the documents depend on, as JSON."""
        return {name: value for name, value in vars(self).items() if name != "is_left"}

    def rearranged(self, document: np.ndarray, number: int, turn: int) -> np.ndarray:
        """Rearrange the tokens of a document, int [n]; return `document` itself if it stays as it is.

        number: the document's; turn: another one for each time that it is read in a training.
        """
        if self.rate == 0 or document.size <= _MARKS:
            return document
        draws, text = _draws(f"{self.seed} {number} {turn}"), document
        for begin, end in _between(document, self.eod):
            draw, part = next(draws), document[begin:end]
            if draw[0] >= self.rate * _WORD:
                continue
            fragments = [(begin, end, draw)]
            if self.split is not None and (part == self.split).any():
                cuts = ((begin + a, begin + b, next(draws)) for a, b in _between(part, self.split))
                fragments = [cut for cut in cuts if cut[2][0] < self.fragment_rate * _WORD]
            for first, last, draw in fragments:
                text = document.copy() if text is document else text
                self._fill(text[first:last], document[first:last], draw)
        return text

    def _fill(self, out: np.ndarray, text: np.ndarray, draw: tuple[int, ...]) -> None:
        count = text.size - _MARKS
        if count < 1 or (self.is_left is not None and self.is_left(text)):
            return
        low, high = sorted(word * (count + 1) // _WORD for word in draw[1:3])
        prefix, middle, suffix = text[:low], text[low:high], text[high:count]
        marks = [np.array([mark], dtype=text.dtype) for mark in (self.prefix, self.suffix, self.middle)]
        if draw[3] < self.spm_rate * _WORD:
            parts = [marks[0], marks[1], suffix, marks[2], prefix, middle]
        else:
            parts = [marks[0], prefix, marks[1], suffix, marks[2], middle]
        np.concatenate(parts, out=out)


def _draws(key: str) -> Iterator[tuple[int, ...]]:
    """Yield four numbers below 2^64 after four: whether, the two cuts, and which order."""
    number = 0
    while True:
        yield struct.unpack("<4Q", hashlib.blake2b(f"{key} {number}".encode(), digest_size=32).digest())
        number += 1


def _between(tokens: np.ndarray, separator: int | None) -> Iterator[tuple[int, int]]:
    """The beginnings and ends of what lies between separators."""
    begin = 0
    for end in () if separator is None else np.flatnonzero(tokens == separator).tolist():
        yield begin, end
        begin = end + 1
    yield begin, tokens.size


def infill_of(settings: FimConfig, seed: int, size: int, eod: int | None, tokenizer: Tokenizer | None) -> Infill:
    """The fill-in-the-middle of a run.

    size: of the vocabulary; eod: its end of document; tokenizer: None if only the size is known.
    Raises DataError if a token is not of the vocabulary, or if two have one id.
    """
    flags = ("prefix_token", "middle_token", "suffix_token", "eod_token", "split_sample")
    given = {flag: getattr(settings, f"fim_{flag}") for flag in flags}
    names = {flag: name for flag, name in given.items() if name is not None}
    ids = _ids_of(set(names.values()), size, tokenizer)
    for flag, name in names.items():
        if name not in ids:
            raise DataError(
                f"`fim_{flag}` must be a token of the vocabulary, but {name!r} is none; give one with "
                f"--fim-{flag.replace('_', '-')}."
            )
    tokens = {flag: ids[name] for flag, name in names.items()}
    ends = tokens.get("eod_token", eod)
    if len({ends, *tokens.values()}) < len(tokens) + ("eod_token" not in tokens):
        raise DataError(
            f"the marks of fill-in-the-middle must differ from each other and from the end of a document "
            f"({ends}), but are {tokens}; give others."
        )
    is_left = None
    if settings.fim_no_prefix:
        if tokenizer is None:
            raise DataError("`fim_no_prefix` must come with a tokenizer, but there is none; give one.")
        is_left = _Start(settings.fim_no_prefix, tokenizer)
    return Infill(
        seed,
        settings.fim_rate,
        settings.fim_spm_rate,
        settings.fim_rate if settings.fim_fragment_rate is None else settings.fim_fragment_rate,
        tokens["prefix_token"],
        tokens["middle_token"],
        tokens["suffix_token"],
        ends,
        tokens.get("split_sample"),
        settings.fim_no_prefix,
        is_left,
    )


def _ids_of(names: set[str], size: int, tokenizer: Tokenizer | None) -> dict[str, int]:
    """The ids of tokens by their texts; without a tokenizer, texts are numbers."""
    if tokenizer is None:
        return {name: int(name) for name in names if name.isdecimal() and int(name) < size}
    ids: dict[str, int] = {}
    for number in range(tokenizer.vocab_size - 1, -1, -1):  # marks are mostly the last tokens
        text = tokenizer.decode([number])
        if text in names:
            ids.setdefault(text, number)
            if len(ids) == len(names):
                break
    return ids


@dataclass(frozen=True)
class _Start:
    """Whether the tokens of a text begin with `text`."""

    text: str
    tokenizer: Tokenizer

    def __call__(self, tokens: np.ndarray) -> bool:
        first = tokens[: len(self.text.encode())].tolist()  # a token is a byte at least
        return self.tokenizer.decode(first).startswith(self.text)
