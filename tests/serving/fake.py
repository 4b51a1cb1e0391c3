"""A stand-in for the engine: a "model" that makes chosen tokens, at once and without weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from megazero.serving.engine import Counters, EngineLimits, QueueFullError
from megazero.serving.wanted import Ended, Listener, PromptScores, Token, Wanted

Script = Callable[[Wanted, int], int]
"""The token at a place behind a prompt."""


def repeated(wanted: Wanted, place: int) -> int:
    """The prompt's tokens over and over."""
    return wanted.prompt[place % len(wanted.prompt)]


def saying(*ids: int) -> Script:
    """These tokens, over and over."""
    return lambda _, place: ids[place % len(ids)]


class FakeEngine:
    """Makes tokens by a script in a thread of its own, one of each request in turn.

    Log-probabilities are -0.5 for the drawn token and -1.5, -2.5, ... for the ids above it.
    """

    def __init__(
        self, script: Script = repeated, limits: EngineLimits | None = None, *, paused: bool = False
    ):
        self.script = script
        self.limits = limits or EngineLimits(
            max_length=256, pages=64, page=16, tokens_per_step=64, max_running=8, max_waiting=64
        )
        self.submitted: list[Wanted] = []
        self.cancelled: list[int] = []
        self.go = threading.Event()
        self.vocabulary = 257
        self.preempted = self.made = self.read = 0
        self.answered = time.monotonic()
        self.fails_after: int | None = None
        self._live: dict[int, tuple[Wanted, Listener, int]] = {}
        self._lock, self._ends = threading.Lock(), False
        if not paused:
            self.go.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, wanted: Sequence[Wanted], listeners: Sequence[Listener]) -> list[int]:
        with self._lock:
            if len(self._live) + len(wanted) > self.limits.max_waiting:
                raise QueueFullError("the queue must have a place, but is full; try again")
            first = len(self.submitted)
            self.submitted += wanted
            for i, (one, listener) in enumerate(zip(wanted, listeners, strict=True)):
                self._live[first + i] = (one, listener, -1)
            return list(range(first, first + len(wanted)))

    def cancel(self, ticket: int) -> None:
        with self._lock:
            self.cancelled.append(ticket)
            self._live.pop(ticket, None)

    @property
    def counters(self) -> Counters:
        live = len(self._live)
        return Counters(
            running=min(live, self.limits.max_running),
            waiting=max(0, live - self.limits.max_running),
            pages_used=live,
            pages=self.limits.pages,
            prompt_tokens=self.read,
            generated_tokens=self.made,
            preemptions=self.preempted,
            cached_tokens=0,
        )

    def close(self) -> None:
        self._ends = True
        self.go.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends:
            self.go.wait(0.01)
            with self._lock:
                live = list(self._live.items()) if self.go.is_set() else []
            for ticket, (wanted, listener, place) in live:
                self._step(ticket, wanted, listener, place)
            if not live:
                threading.Event().wait(0.001)

    def _step(self, ticket: int, wanted: Wanted, listener: Listener, place: int) -> None:
        if place < 0:
            self.read += len(wanted.prompt)
            if wanted.prompt_logprobs is not None:
                rows = [self._token(i, wanted.prompt_logprobs) for i in wanted.prompt[1:]]
                listener(PromptScores((None, *rows)))
            ended = Ended("length") if wanted.max_tokens == 0 else None
        elif self.fails_after is not None and place >= self.fails_after:
            ended = Ended("error", "the model must be finite, but is not")
        else:
            self.made += 1
            token = self.script(wanted, place)
            listener(self._token(token, wanted.logprobs))
            stops = token in wanted.stop_ids and place >= wanted.min_tokens
            ended = Ended("stop") if stops else Ended("length") if place + 1 == wanted.max_tokens else None
        if ended is not None:
            listener(ended)
        with self._lock:
            if ended is not None:
                self._live.pop(ticket, None)
            elif ticket in self._live:
                self._live[ticket] = (wanted, listener, place + 1)

    def _token(self, token: int, best: int | None) -> Token:
        if best is None:
            return Token(token, None, ())
        rows = tuple(((token + i) % self.vocabulary, -0.5 - i) for i in range(best))
        return Token(token, -0.5, rows)
