"""Split texts into sentences with sentencex, Wikimedia's library (MIT): rules per language and no download.

Its weaknesses (1.0.32) are avoided: it loses every blank line after the first 10,000 characters, fails at a
name's initial after a wide space, and takes quadratic time for long paragraphs. So it gets one paragraph at a
time, and a long paragraph through a window that moves from sentence to sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from megazero.data.tokenizers.base import is_failure
from megazero.errors import DataError

# The languages of sentencex's rules, with NLTK's names if it has them. The code "" gives the rules that are
# common to all languages, which know no abbreviations.
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
# Characters of a window; for longer paragraphs, the library's time per character grows noticeably.
_WINDOW = 2048
# The text after a full stop decides whether a sentence ends there, so ends within this many characters of the
# window's end are not used.
_UNSEEN = 256
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_INITIALS = re.compile(r"(?:[^\W\d_]\.-?)+\s*")
_LONGEST_INITIALS = 12
_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")


@dataclass(frozen=True)
class SentenceRules:
    """Rules of splitting.

    Attributes:
        language: a name or code of `LANGUAGES`.
        keep_newlines: whether a sentence keeps the whitespace after it, so that sentences add up to the text.
    """

    language: str = "english"
    keep_newlines: bool = False


class SentenceSplitter:
    """Splits texts by rules. Raises DataError for an unknown language, or if sentencex is not installed.

    A blank line ends a sentence, a single newline does not. Only whitespace around sentences is dropped. A
    text of whitespace alone has no sentences.
    """

    def __init__(self, rules: SentenceRules):
        self._code = _code_of(rules.language)
        self._segment = _library()
        self._keep_newlines = rules.keep_newlines

    def __call__(self, text: str) -> list[str]:
        """Split a text into its sentences. Raises DataError if the library fails on it."""
        # Each character is replaced by one character, so positions in `plain` are positions in `text`.
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
        """Yield the ends of the sentences, ascending; the last is the end of the text."""
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
        """Divide a paragraph by the library, through a window."""
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
    """Count the pieces of a window that are certain: all that end before its last `_UNSEEN` characters.

    If a line ends in the window's second half, only the pieces up to there are taken, because quotes seldom
    extend over lines.
    """
    ends = [end for end in accumulate(map(len, pieces)) if end <= width - _UNSEEN]
    for number in range(len(ends), 0, -1):
        if ends[number - 1] < width // 2:
            break
        piece = pieces[number - 1]
        if "\n" in piece[len(piece.rstrip()) :]:
            return number
    return len(ends)


def _rejoined(pieces: Iterator[str]) -> Iterator[str]:
    """Join pieces that no language separates: after a full stop without a space ("J.-P."), and after initials
    alone ("M. Dupont", "J.-P. Sartre").
    """
    joined = ""
    for piece in pieces:
        joined += piece
        if joined[-1] == "." or (len(joined) < _LONGEST_INITIALS and _INITIALS.fullmatch(joined)):
            continue
        yield joined
        joined = ""
    if joined:
        yield joined


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
