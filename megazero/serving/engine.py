"""`Engine`: answers many requests at once on the ranks of a model; `complete`: the same for a fixed list."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megazero.errors import ConfigError, MegazeroError
from megazero.inference.sampling import choose_tokens
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch, Places
from megazero.serving.wanted import Ended, Event, Listener, PromptScores, Reason, Token, Wanted


class QueueFullError(MegazeroError):
    """More requests wait than an engine may hold."""


@dataclass(frozen=True)
class EngineLimits:
    """What bounds an engine's memory and its steps.

    Attributes:
        max_length: the most tokens of a request, prompt and text.
        pages: the number of pages of keys and values.
        page: the positions of a page.
        tokens_per_step: the most tokens of a step.
        max_running: the most requests in a step.
        max_waiting: the most requests that wait.
    """

    max_length: int = 2048
    pages: int = 1024
    page: int = 32
    tokens_per_step: int = 512
    max_running: int = 64
    max_waiting: int = 1024


@dataclass(frozen=True)
class Counters:
    """What an engine has done and is doing.

    Attributes:
        running, waiting: requests now.
        pages_used, pages: pages that requests hold, and all pages.
        prompt_tokens, generated_tokens: since the start.
        preemptions: times that a request lost its pages and began again.
        cached_tokens: tokens whose keys and values another request had left in pages.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Completed:
    """A request's tokens, why it ended, and the scores of its prompt if it asked for them."""

    tokens: tuple[Token, ...]
    reason: Reason
    prompt_scores: PromptScores | None = None


class Engine:
    """Answers requests; every rank of the model makes one, and rank 0 takes requests and decides.

    Args:
        model: the model, without sequence parallelism.
        limits: bounds of memory and steps.
    """

    def __init__(self, model: StagedModel[Batch], limits: EngineLimits | None = None):
        self.model, self.limits = model, limits or EngineLimits()
        self._waiting: deque[tuple[int, Wanted, Listener]] = deque()
        self._news = threading.Condition()
        self._cancelled: set[int] = set()
        self._tickets = 0
        self._stopped = False
        self._counters = Counters(pages=self.limits.pages)

    def submit(self, wanted: Sequence[Wanted], listeners: Sequence[Listener]) -> list[int]:
        """Queue requests, on rank 0 and from any thread; return their tickets.

        Raises:
            ConfigError: a request is longer than the limits allow.
            QueueFullError: too many requests wait.
        """
        for request in wanted:
            length = len(request.prompt) + request.max_tokens
            if length > self.limits.max_length:
                raise ConfigError(
                    f"`prompt length + max_tokens` must be at most {self.limits.max_length}, but is "
                    f"{len(request.prompt)} + {request.max_tokens}; shorten the prompt or ask for less"
                )
        with self._news:
            if len(self._waiting) + len(wanted) > self.limits.max_waiting:
                raise QueueFullError(
                    f"`waiting requests` must be at most {self.limits.max_waiting}, but would be "
                    f"{len(self._waiting) + len(wanted)}; try again later"
                )
            tickets = list(range(self._tickets, self._tickets + len(wanted)))
            self._tickets += len(wanted)
            self._waiting.extend(zip(tickets, wanted, listeners, strict=True))
            self._news.notify()
        return tickets

    def cancel(self, ticket: int) -> None:
        """End a request, on rank 0 and from any thread; nothing happens if it has ended."""
        with self._news:
            self._cancelled.add(ticket)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Answer requests until none is left and `until()`, or `stop`; other ranks follow rank 0."""
        with torch.inference_mode():
            while not self._stopped:
                with self._news:
                    if not self._waiting:
                        if until is None or until():
                            return
                        self._news.wait(0.05)
                        continue
                    ticket, wanted, listener = self._waiting.popleft()
                self._answer(ticket, wanted, listener)

    def stop(self) -> None:
        """End the loop on every rank; called on rank 0, from any thread."""
        self._stopped = True
        with self._news:
            self._news.notify()

    @property
    def counters(self) -> Counters:
        """What the engine has done and is doing."""
        return self._counters

    def _answer(self, ticket: int, wanted: Wanted, listener: Listener) -> None:
        tokens, device = list(wanted.prompt), self.model.device
        cache = self.model.new_cache(len(tokens) + wanted.max_tokens)
        fed, end = 0, len(tokens) + wanted.max_tokens
        while len(tokens) < end:
            if ticket in self._cancelled:
                return listener(Ended("cancelled"))
            batch = Batch(
                torch.tensor([tokens[fed:]], device=device), places=Places(range(fed, len(tokens)))
            )
            logits = self.model.logits(batch, cache)
            fed = len(tokens)
            token = int(choose_tokens(logits, wanted.sampling, [wanted.number], fed))
            best = logits.log_softmax(-1)[0].topk(wanted.logprobs or 1)
            logprob = float(logits.log_softmax(-1)[0, token]) if wanted.logprobs is not None else None
            pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            tokens.append(token)
            listener(Token(token, logprob, pairs if wanted.logprobs else ()))
            if token in wanted.stop_ids:
                return listener(Ended("stop"))
        listener(Ended("length"))


def complete(
    model: StagedModel[Batch], wanted: Sequence[Wanted], limits: EngineLimits | None = None
) -> list[Completed]:
    """Answer a fixed list of requests; every rank calls this with the same arguments and gets the same.

    Raises:
        ConfigError: a request is longer than the limits allow.
    """
    engine = Engine(model, limits)
    events: list[list[Event]] = [[] for _ in wanted]
    engine.submit(wanted, [mine.append for mine in events])
    engine.run()
    return [_completed(mine) for mine in events]


def _completed(events: Sequence[Event]) -> Completed:
    scores = next((event for event in events if isinstance(event, PromptScores)), None)
    (ended,) = [event for event in events if isinstance(event, Ended)]
    tokens = tuple(event for event in events if isinstance(event, Token))
    return Completed(tokens, ended.reason, scores)
