"""The objects of OpenAI's answers: completions and chats, whole and in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megazero.serving.http.answering import Finished
from megazero.serving.text import Decoder, Shown, TokenTexts
from megazero.serving.wanted import PromptScores, Token

_LEAST = -9999.0  # JSON has no minus infinity
Choice = dict[str, Any]


@dataclass(frozen=True)
class Scored:
    """How log-probabilities are shown.

    Attributes:
        texts: the tokenizer.
        best: the likeliest tokens at each place; None for no log-probabilities at all.
    """

    texts: TokenTexts
    best: int | None = None

    def rows(self, token: Token) -> list[tuple[int, float]]:
        """The best tokens at a place, and the token itself, with their log-probabilities."""
        rows = dict(token.best[: self.best or 0])
        rows.setdefault(token.id, -float("inf") if token.logprob is None else token.logprob)
        return [(i, max(_LEAST, logprob)) for i, logprob in rows.items()]


@dataclass(frozen=True)
class CompletionShape:
    """Answers of `/v1/completions`."""

    scored: Scored
    prefix: str = "cmpl-"
    whole: str = "text_completion"
    part: str = "text_completion"

    def opening(self, index: int) -> list[Choice]:
        """Nothing: the first event has text."""
        return []

    def choice(self, index: int, done: Finished, echo: str) -> Choice:
        """A whole choice."""
        return self.delta(index, echo + done.text, done.tokens, done.reason)

    def delta(self, index: int, text: str, tokens: Sequence[Shown], reason: str | None) -> Choice:
        """A piece of a choice."""
        logprobs = None if self.scored.best is None else self._logprobs(tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[Shown]) -> dict[str, Any]:
        own = [None if shown.token is None else shown.token.logprob for shown in tokens]
        return {
            "tokens": [self.scored.texts.name(shown.id) for shown in tokens],
            "token_logprobs": [None if value is None else max(_LEAST, value) for value in own],
            "top_logprobs": [None if shown.token is None else self._by_name(shown.token) for shown in tokens],
            "text_offset": [shown.start for shown in tokens],
        }

    def _by_name(self, token: Token) -> dict[str, float]:
        named: dict[str, float] = {}
        for i, logprob in self.scored.rows(token):
            name = self.scored.texts.name(i)
            # Two tokens may have one text, parts of characters above all.
            named[f"token_id:{i}" if name in named else name] = logprob
        return named


@dataclass(frozen=True)
class ChatShape:
    """Answers of `/v1/chat/completions`."""

    scored: Scored
    prefix: str = "chatcmpl-"
    whole: str = "chat.completion"
    part: str = "chat.completion.chunk"

    def opening(self, index: int) -> list[Choice]:
        """One event that says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, index: int, done: Finished, echo: str) -> Choice:
        """A whole choice."""
        message = {"role": "assistant", "content": echo + done.text, "refusal": None}
        logprobs = self._logprobs(done.tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": done.reason}

    def delta(self, index: int, text: str, tokens: Sequence[Shown], reason: str | None) -> Choice:
        """A piece of a choice, and none with the reason."""
        delta = {"content": text} if text else {}
        logprobs = self._logprobs(tokens) if tokens else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[Shown]) -> dict[str, Any] | None:
        if self.scored.best is None:
            return None
        content = []
        for shown in tokens:
            assert shown.token is not None, "chats do not echo"
            rows = self.scored.rows(shown.token)
            own = dict(rows)[shown.id]
            top = [self._row(i, logprob) for i, logprob in rows[: self.scored.best]]
            content.append({**self._row(shown.id, own), "top_logprobs": top})
        return {"content": content}

    def _row(self, token: int, logprob: float) -> dict[str, Any]:
        name = self.scored.texts.name(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in name  # the bytes of a part of a character are not known
        return {"token": name, "logprob": logprob, "bytes": list(name.encode()) if whole else None}


Shape = CompletionShape | ChatShape


def echoed(texts: TokenTexts, ids: Sequence[int], scores: PromptScores | None) -> tuple[str, list[Shown]]:
    """The text of a prompt's tokens, and where each of them stands; without scores none does."""
    decoder, text, tokens = Decoder(texts, skip_special=False), "", []
    for i, token in enumerate(ids):
        new = decoder.add(token)
        tokens.append(Shown(token, scores.tokens[i] if scores else None, len(text), len(text) + len(new)))
        text += new
    return text + decoder.flush(), tokens if scores else []
