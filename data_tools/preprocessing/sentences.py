"""Splits texts into sentences with sentencex, Wikimedia's library (MIT): rules per language and no download.

The library is kept away from what it does not do well (1.0.32): it loses every blank line after its first
10,000 characters, fails at a name's initial after a wide space, and takes quadratic time over long
paragraphs. So paragraphs go to it one by one, long ones through a window that moves from sentence to
sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from megazero.data.tokenizers.base import is_failure
from megazero.errors import DataError

# The languages that sentencex has rules for, under NLTK's names where it has them. The code "" has no rules
# of its own: it gives those that are common to all languages, which know no abbreviations.
LANGUAGES = MappingProxyType(
    {
        "any": "", "amharic": "am", "arabic": "ar", "armenian": "hy", "bengali": "bn", "bulgarian": "bg",
        "burmese": "my", "catalan": "ca", "chinese": "zh", "danish": "da", "dutch": "nl", "english": "en",
        "finnish": "fi", "french": "fr", "german": "de", "greek": "el", "gujarati": "gu", "hindi": "hi",
        "italian": "it", "japanese": "ja", "kannada": "kn", "kazakh": "kk", "malayalam": "ml",
        "marathi": "mr", "polish": "pl", "portuguese": "pt", "punjabi": "pa", "russian": "ru",
        "slovak": "sk", "spanish": "es", "tamil": "ta", "telugu": "te", "ukrainian": "uk",
    }
)  # fmt: skip
# Characters. The library's time per character grows with a paragraph's length; past this it is noticed.
_WINDOW = 2048
# What follows a full stop decides whether it ends a sentence, so an end this near the window's is not
# trusted.
_UNSEEN = 256
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_INITIALS = re.compile(r"(?:[^\W\d_]\.-?)+\s*")
_LONGEST_INITIALS = 12
_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")


@dataclass(frozen=True)
class SentenceRules:
    """Rules of splitting. `language` is a name or code of `LANGUAGES`; `keep_newlines` leaves the whitespace
    after a sentence at its end, so that the sentences of a text add up to it; otherwise it is dropped."""

    language: str = "english"
    keep_newlines: bool = False


class SentenceSplitter:
    """Splits texts by these rules. DataError for an unknown language, or if sentencex is not installed.

    A blank line ends a sentence, a single newline does not. Nothing but the whitespace around sentences is
    ever left out. A text of whitespace alone has no sentences.
    """

    def __init__(self, rules: SentenceRules):
        self._code = _code_of(rules.language)
        self._segment = _library()
        self._keep_newlines = rules.keep_newlines

    def __call__(self, text: str) -> list[str]:
        """The sentences of a text in order. DataError if the library fails on it."""
        # One character for another, so that what is found in `plain` is a place in `text`.
        plain = text if text.isascii() else _WIDE_SPACE.sub(" ", text)
        sentences: list[str] = []
        start = 0
        for end in self._ends(plain):
            sentence = text[start:end]
            if not sentence.isspace():
                sentences.append(sentence if self._keep_newlines else sentence.strip())
                start = end
            elif sentences:
                sentences[-1] += sentence if self._keep_newlines else ""
                start = end
        return sentences

    def _ends(self, text: str) -> Iterator[int]:
        """The ends of the sentences: rising, the last one at the end of the text."""
        start = 0
        for blank in _BLANK_LINES.finditer(text):
            *ends, _ = (start, *self._ends_in_paragraph(text, start, blank.start()))
            yield from ends[1:]
            start = blank.end()
            yield start
        if start < len(text):
            yield from self._ends_in_paragraph(text, start, len(text))

    def _ends_in_paragraph(self, text: str, start: int, end: int) -> Iterator[int]:
        paragraph = text[start:end]
        lengths = map(len, _rejoined(self._pieces(paragraph)))
        return (start + length for length in accumulate(lengths))

    def _pieces(self, paragraph: str) -> Iterator[str]:
        """Divide a paragraph by the library, which is given no more than it needs to see at once."""
        start, width = 0, _WINDOW
        while len(paragraph) - start > width:
            pieces = self._ask(paragraph[start : start + width])
            sure = _sure(pieces, width)
            if not sure:
                width *= 2
                continue
            yield from pieces[:sure]
            start += sum(map(len, pieces[:sure]))
            width = _WINDOW
        yield from self._ask(paragraph[start:])

    def _ask(self, text: str) -> list[str]:
        try:
            pieces = self._segment(self._code, text)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise DataError(
                f"text must be such that sentencex can split it, but it fails: {error}."
            ) from error
        if sum(map(len, pieces)) != len(text):
            raise DataError(f"sentences must add up to their text, but sentencex changes {text[:60]!r} ...")
        return pieces


def _sure(pieces: list[str], width: int) -> int:
    """Count the pieces to take of a window: up to the last end that was seen well, or better up to the last
    end of a line in the window's second half, as quotes seldom go over lines."""
    ends = [end for end in accumulate(map(len, pieces)) if end <= width - _UNSEEN]
    for number in range(len(ends), 0, -1):
        if ends[number - 1] < width // 2:
            break
        piece = pieces[number - 1]
        if "\n" in piece[len(piece.rstrip()) :]:
            return number
    return len(ends)


def _rejoined(pieces: Iterator[str]) -> Iterator[str]:
    """Take back two kinds of ends that are none in any language: after a full stop without a space
    ("J.-P."), and after nothing but initials ("M. Dupont", "J.-P. Sartre")."""
    held = ""
    for piece in pieces:
        held += piece
        if held[-1] == "." or (len(held) < _LONGEST_INITIALS and _INITIALS.fullmatch(held)):
            continue
        yield held
        held = ""
    if held:
        yield held


def _code_of(language: str) -> str:
    name = language.lower()
    if name in LANGUAGES:
        return LANGUAGES[name]
    if name in LANGUAGES.values():
        return name
    raise DataError(
        f"`--lang` must be one of {', '.join(sorted(LANGUAGES))} or the code of one of them, but is "
        f"{language}; `any` splits by what is common to all languages."
    )


def _library() -> Callable[[str, str], list[str]]:
    try:
        from sentencex import segment
    except ImportError as error:
        raise DataError(
            "`--split-sentences` must have the package sentencex, but it is not installed; run `pip install "
            "sentencex`, or give lists of sentences in the jsonl."
        ) from error
    split: Callable[[str, str], list[str]] = segment
    return split
