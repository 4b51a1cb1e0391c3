"""The notations of DeepSpeed's files that JSON does not have, turned into JSON.

DeepSpeed reads its files with hjson. The part of it that people write by hand is read here too: comments
(``#``, ``//``, ``/* */``), commas before a closing bracket or missing at the end of a line, keys without
quotes, texts in single quotes, and a file without its outer braces. A value without quotes stays a fault:
hjson takes it as text up to the end of its line, so that ``False,`` would be true.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

_TEXT = r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])*'"
_COMMENT = re.compile(_TEXT + r"|(#[^\n]*|//[^\n]*|/\*.*?\*/)", re.DOTALL)
_TOKEN = re.compile(_TEXT + r"""|["']|[{}\[\]:,]|[^\s{}\[\]:,"']+""")
_OPENS, _CLOSES = frozenset("{[,:"), frozenset("}],:")


@dataclass(frozen=True)
class Relaxed:
    """A text as JSON.

    Attributes:
        given: the text as it was given.
        json: the text as JSON, on the same lines.
        edits: (position in `json`, number of characters by which `json` is longer from there on), in order.
    """

    given: str
    json: str
    edits: tuple[tuple[int, int], ...]

    def place(self, position: int) -> str:
        """Line and column, from 1, in `given` of a position in `json`."""
        before = bisect_right(self.edits, position, key=lambda edit: edit[0])
        position -= self.edits[before - 1][1] if before else 0
        line = self.given.count("\n", 0, position) + 1
        return f"{line}:{position - self.given.rfind(chr(10), 0, position)}"

    def line(self, position: int) -> int:
        """The line, from 1, of a position; both texts have the same lines."""
        return self.json.count("\n", 0, position) + 1


def relaxed(text: str) -> Relaxed:
    """Turn a text into JSON, as far as its meaning is clear."""
    bare = _COMMENT.sub(lambda match: re.sub(r"\S", " ", match[0]) if match[1] else match[0], text)
    pieces, edits, at, longer, length = [], [], 0, 0, 0
    for start, stop, replacement in _edits(bare):
        pieces += [bare[at:start], replacement]
        length += start - at + len(replacement)
        longer += len(replacement) - (stop - start)
        at = stop
        edits.append((length, longer))
    return Relaxed(text, "".join([*pieces, bare[at:]]), tuple(edits))


def _edits(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, replacement) of each part of the text that is not JSON."""
    tokens = [*_TOKEN.finditer(text)]
    open_ended = len(tokens) > 1 and tokens[1][0] == ":"
    before, depth = "{", int(open_ended)
    if open_ended:
        yield tokens[0].start(), tokens[0].start(), "{"
    for token, following in pairwise([*tokens, None]):
        assert token is not None
        word, start, stop = token[0], token.start(), token.end()
        if word in ('"', "'"):
            return  # a text without its end: what follows cannot be told
        after = "" if following is None else following[0]
        depth += (word in ("{", "[")) - (word in ("}", "]"))
        if word == "," and after in ("}", "]"):
            yield start, stop, " "
        elif word[0] == "'":
            yield start, stop, json.dumps(re.sub(r"\\(.)", r"\1", word[1:-1]), ensure_ascii=False)
        elif after == ":" and before in ("{", ",") and word[0] not in '"{}[]:,':
            yield start, stop, f'"{word}"'
        ends = depth > 0 and word not in _OPENS and after not in _CLOSES
        if following is not None and ends and "\n" in text[stop : following.start()]:
            yield stop, stop, ","
            word = ","
        before = word
    if open_ended:
        yield len(text), len(text), "}"
