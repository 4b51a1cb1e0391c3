"""Text from a stream of tokens: characters over several tokens, stop strings, and where each token stands.

A choice's text is what its pieces add up to, so a streamed answer and a whole one are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.library import LibraryTokenizer
from megazero.serving.wanted import Token

_LOST = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED = 3  # the most bytes, so the most tokens, of a character that is not complete
_CONTEXT = 8  # tokens that the next one is decoded behind
_WINDOW = 32


class TokenTexts:
    """A tokenizer's tokens as text.

    Attributes:
        special: the ids of special tokens, which texts leave out unless they are asked for.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        special = {*tokenizer.special_ids.values(), *tokenizer.extra_ids}
        special |= set() if tokenizer.eod is None else {tokenizer.eod}
        if isinstance(tokenizer, LibraryTokenizer):
            special |= {row["id"] for row in tokenizer.definition()["added_tokens"] if row["special"]}
        self.special = frozenset(special)
        self._names: dict[int, str] = {}
        self._behind = next((i for i in range(tokenizer.vocab_size) if self._is_letter(i)), None)

    def name(self, token: int) -> str:
        """The text of a token behind others; U+FFFD for a part of a character."""
        if token not in self._names:
            before = [] if self._behind is None else [self._behind]
            text = self.tokenizer.decode([*before, token])
            self._names[token] = text[len(self.tokenizer.decode(before)) :]
        return self._names[token]

    def _is_letter(self, token: int) -> bool:
        return token not in self.special and self.tokenizer.decode([token]).isalnum()


class Decoder:
    """Decodes a growing row of tokens, and gives a text as soon as no later token can change it.

    Tokens are decoded in a window behind some that came before, because a suffix alone would lose a leading
    space. The window begins behind a complete character, unless none has come for long.

    Args:
        texts: the tokenizer.
        before: the tokens of the prompt.
        skip_special: leave special tokens out.
        complete: whether the prompt ends with a complete character, whatever its last one is.
    """

    def __init__(
        self,
        texts: TokenTexts,
        before: Sequence[int] = (),
        *,
        skip_special: bool = True,
        complete: bool = True,
    ):
        self._decode = texts.tokenizer.decode
        self._skipped = texts.special if skip_special else frozenset()
        self._pending = 0  # tokens since the last complete character
        prompt = [i for i in before[-_WINDOW:] if i not in self._skipped]
        end = len(prompt)
        while not complete and end and len(prompt) - end < _UNFINISHED and _held(self._decode(prompt[:end])):
            end -= 1
        start = max(0, end - _CONTEXT)
        while start and end - start < 2 * _CONTEXT and self._decode(prompt[start:end])[:1] in ("", _LOST):
            start -= 1
        self._window = prompt[:end]
        self._shift(start)
        if complete:
            self._sent = len(self._decode(self._window))
        for token in prompt[end:]:  # a character that the prompt has begun
            self.add(token)

    def add(self, token: int) -> str:
        """The text that is certain with one more token, maybe empty."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = _held(text)
        self._pending = self._pending + 1 if held else 0
        if 0 < self._pending <= _UNFINISHED:
            return ""  # one incomplete character makes some tokenizers lose all before it
        end = max(self._sent, len(text) - held)
        new, self._sent = text[self._sent : end], end
        if not held and len(self._window) > _CONTEXT and self._decode(self._window[self._safe :]):
            self._shift(self._safe)
        elif len(self._window) > _WINDOW:
            self._shift(len(self._window) - _CONTEXT)
        return new

    def flush(self) -> str:
        """The rest of the text, with U+FFFD for a character that was not completed."""
        text = self._decode(self._window)
        rest, self._sent = text[self._sent :], len(text)
        return rest

    def _shift(self, start: int) -> None:
        self._window = self._window[start:]
        text = self._decode(self._window)
        self._sent = len(text) - _held(text)
        # Where a window may begin: behind a complete character.
        self._safe = len(self._window) if self._sent == len(text) else 0


def _held(text: str) -> int:
    """How many characters at the end may be parts of one that is not complete."""
    return min(_UNFINISHED, len(text) - len(text.rstrip(_LOST)))


@dataclass(frozen=True)
class StopRule:
    """Where a text ends.

    Attributes:
        strings: the text ends before the first of them.
        include: the text ends behind it instead.
        min_tokens: strings in the text of so many tokens do not count.
    """

    strings: tuple[str, ...] = ()
    include: bool = False
    min_tokens: int = 0

    def held(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string may begin with."""
        longest = max((len(stop) for stop in self.strings), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.strings):
                return size
        return 0

    def first(self, text: str) -> tuple[int, int] | None:
        """Where the first stop string begins and ends in `text`; of two at one place, the longer one."""
        places = [(text.find(stop), -len(stop)) for stop in self.strings if stop in text]
        start, size = min(places, default=(-1, 0))
        return None if start < 0 else (start, start - size)


@dataclass(frozen=True)
class Shown:
    """A token and the characters [start, end) of the text that are certain with it.

    The prompt's first token has no scores, `token` is None then.
    """

    id: int
    token: Token | None
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """A further piece of a choice's text, and the tokens that end in it; ended: at a stop string."""

    text: str = ""
    tokens: tuple[Shown, ...] = ()
    ended: bool = False


@dataclass
class ChoiceText:
    """The text of one choice: tokens in, pieces out.

    Attributes:
        decoder: decodes its tokens.
        rule: where it ends.
        special: ids whose text is never cut in two pieces.
        start: the place of its first character, behind a prompt that is echoed.
        count: tokens so far.
    """

    decoder: Decoder
    rule: StopRule = StopRule()
    special: frozenset[int] = frozenset()
    start: int = 0
    count: int = 0
    _held: str = ""
    _tokens: list[Shown] = field(default_factory=list)

    def add(self, token: Token, *, silent: bool = False) -> Piece:
        """The piece that is certain with one more token; a silent one has no text: it ended the choice."""
        end = self.start + len(self._held)
        new = "" if silent else self.decoder.add(token.id)
        self.count += 1
        self._held += new
        self._tokens.append(Shown(token.id, token, end, end + len(new)))
        if self.count <= self.rule.min_tokens:
            return self._release(len(self._held))
        return self._stopped() or self._release(len(self._held) - self._kept())

    def finish(self) -> Piece:
        """The last piece: all that was held back."""
        self._held += self.decoder.flush()
        searched = self.count > self.rule.min_tokens
        return (self._stopped() if searched else None) or self._release(len(self._held), everything=True)

    def _kept(self) -> int:
        """How many characters to hold back."""
        cut = self.start + len(self._held) - self.rule.held(self._held)
        for shown in self._tokens:
            if shown.id in self.special and shown.start < cut < shown.end:
                cut = shown.start
        return self.start + len(self._held) - cut

    def _stopped(self) -> Piece | None:
        """The piece up to the first stop string, with the tokens up to the one that reaches it."""
        place = self.rule.first(self._held)
        if place is None:
            return None
        size = place[self.rule.include]
        reach = self.start + (size - 1 if self.rule.include else size)
        last = next((i for i, shown in enumerate(self._tokens) if shown.end > reach), len(self._tokens) - 1)
        return Piece(self._held[:size], tuple(self._tokens[: last + 1]), ended=True)

    def _release(self, size: int, *, everything: bool = False) -> Piece:
        self.start += size
        text, self._held = self._held[:size], self._held[size:]
        ready = [shown for shown in self._tokens if everything or shown.end <= self.start]
        self._tokens = self._tokens[len(ready) :]
        return Piece(text, tuple(ready))
