"""Fill-in-the-middle (Bavarian et al. 2022): documents cut in prefix, middle and suffix, the middle last.

    PSM: <prefix> prefix <suffix> suffix <middle> middle
    SPM: <prefix> <suffix> suffix <middle> prefix middle

The three marks take the places of a text's last three tokens, so that it keeps its length, and the samples of
an index their boundaries. Cuts lie between tokens: what the file holds is neither decoded nor encoded again.
All is drawn from a hash of the seed, the document and its turn, so a document is the same for whichever rank
or thread reads it, and however much of it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megazero.config.fim import FimConfig
from megazero.config.tree.config import Config
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError

_TOKENS = ("prefix_token", "suffix_token", "middle_token", "eod_token", "split_sample")
_WORD = 1 << 64

Pieces = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""The pieces of documents that samples consist of, [n] each: the first piece of each sample, [b]; documents;
begins; ends, with the last label; turns, which tell the times that a document is read from each other."""


@dataclass(frozen=True)
class Infill:
    """The settings, and their tokens as ids.

    marks: those of prefix, suffix and middle; eod: the token between documents, None if there is none;
    split: the token between fragments; tokenizer: reads `fim_no_prefix`.
    """

    settings: FimConfig
    seed: int
    marks: tuple[int, int, int]
    eod: int | None = None
    split: int | None = None
    tokenizer: Tokenizer | None = None

    @property
    def description(self) -> dict[str, object]:
        """Everything that the rearrangement depends on, as JSON."""
        return {**self.settings.model_dump(), "seed": self.seed, "ids": [*self.marks, self.eod, self.split]}

    def rearranged(self, document: np.ndarray, number: int, turn: int) -> np.ndarray:
        """The tokens of a document, int [n], rearranged; `document` itself if it stays as it is."""
        rate, draws, text = self.settings.fim_rate, _draws(f"{self.seed} {number} {turn}"), document
        fragment_rate = self.settings.fim_fragment_rate
        for begin, end in _between(document, self.eod):
            draw, part = next(draws), document[begin:end]
            if begin == end or draw[0] >= rate * _WORD:
                continue
            fragments = [(begin, end, draw)]
            if self.split is not None and (part == self.split).any():
                least = (rate if fragment_rate is None else fragment_rate) * _WORD
                cuts = [(begin + a, begin + b, next(draws)) for a, b in _between(part, self.split)]
                fragments = [cut for cut in cuts if cut[2][0] < least]
            for first, last, draw in fragments:
                text = document.copy() if text is document else text
                self._fill(text[first:last], document[first:last], draw)
        return text

    def _fill(self, out: np.ndarray, text: np.ndarray, draw: tuple[int, ...]) -> None:
        count, start = text.size - len(self.marks), self.settings.fim_no_prefix
        if count < 1:
            return
        if start and self.tokenizer is not None:
            head = text[: len(start.encode())].tolist()  # a token is a byte at least
            if self.tokenizer.decode(head).startswith(start):
                return
        low, high = sorted(word * (count + 1) // _WORD for word in draw[1:3])
        prefix, middle, suffix = text[:low], text[low:high], text[high:count]
        before, after, last = ([mark] for mark in self.marks)
        if draw[3] < self.settings.fim_spm_rate * _WORD:
            out[:] = np.concatenate([before, after, suffix, last, prefix, middle])
        else:
            out[:] = np.concatenate([before, prefix, after, suffix, last, middle])

    def rewrite(
        self, batch: dict[str, np.ndarray], indexed: IndexedDataset, pieces: Pieces, *, end_to_end: bool
    ) -> None:
        """Rearrange the documents in a batch's `tokens` and `labels`, [b, T]; the other arrays stay right.

        end_to_end: whether the label of a document's last token is the first token of the next one.
        """
        tokens, labels, firsts = batch["tokens"], batch["labels"], {*pieces[0].tolist()}
        row, at = -1, 0
        columns = (column.tolist() for column in pieces[1:])
        for piece, (number, begin, end, turn) in enumerate(zip(*columns, strict=True)):
            if piece in firsts:
                row, at = row + 1, 0
            document = indexed.get(number)
            text = self.rearranged(document, number, turn)
            if text is not document and end > begin:
                text = text[begin:end]
                tokens[row, at : at + text.size] = text[: tokens.shape[1] - at]
                labels[row, at : at + text.size - 1] = text[1:]
                if at and end_to_end:
                    labels[row, at - 1] = text[0]
            at += end - begin


def _draws(key: str) -> Iterator[tuple[int, ...]]:
    """Yield four numbers below 2^64 after four: whether to fill in, both cuts, and in which order."""
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


def infill_of(config: Config, size: int, eod: int | None, tokenizer: Tokenizer | None) -> Infill | None:
    """The fill-in-the-middle of a run with this vocabulary; None without `--fim-data`.

    tokenizer: None if only the vocabulary's size is known, and tokens are given as numbers. Raises DataError
    unless the marks are different tokens of the vocabulary.
    """
    settings = config.fim
    if not settings.fim_data:
        return None
    texts: list[str | None] = [getattr(settings, f"fim_{name}") for name in _TOKENS]
    given = [text for text in texts if text is not None]
    ids = _ids_of({*given}, size, tokenizer)
    missing = [text for text in given if text not in ids]
    tokens = [None if text is None else ids.get(text) for text in texts]
    tokens[3] = eod if texts[3] is None else tokens[3]
    known = [token for token in tokens if token is not None]
    if missing or len({*known}) < len(known):
        raise DataError(
            "the tokens of --fim-data must be different tokens of the vocabulary, but "
            f"{'two are one' if not missing else repr(missing[0]) + ' is none'}; name others by "
            f"{', '.join('--fim-' + name.replace('_', '-') for name in _TOKENS)}."
        )
    if settings.fim_no_prefix and tokenizer is None:
        raise DataError("`--fim-no-prefix` must come with a tokenizer, but there is none; leave it out.")
    prefix, suffix, middle = known[:3]
    return Infill(settings, config.training.seed, (prefix, suffix, middle), tokens[3], tokens[4], tokenizer)


def _ids_of(names: set[str], size: int, tokenizer: Tokenizer | None) -> dict[str, int]:
    """The ids of tokens by their texts."""
    if tokenizer is None:
        return {name: int(name) for name in names if name.isdecimal() and int(name) < size}
    texts = ((tokenizer.decode([number]), number) for number in range(tokenizer.vocab_size))
    return {text: number for text, number in texts if text in names}
