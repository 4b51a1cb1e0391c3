"""The answers of a model to a harness: all ranks of a job compute them, while the first one alone asks.

So the harness, its caches and its files are the first rank's business, and other ranks need no datasets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from megazero.errors import MegazeroError
from megazero.harness.packing import Ids
from megazero.harness.scoring import Score, Scorer
from megazero.harness.text import HarnessTokenizer
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.mpu.messages import broadcast_value
from megazero.mpu.threads import helper_thread
from megazero.serving.engine import Engine
from megazero.serving.limits import EngineLimits
from megazero.serving.wanted import Ended, Event, Penalties, Token, Wanted

_BEAT = 20.0
"""Seconds after which ranks that wait are told so, lest the watch over calls takes the first one for dead."""


@dataclass(frozen=True)
class Continued:
    """A text to be continued.

    Attributes:
        prompt: its tokens.
        most: the most tokens to draw.
        until: texts that end it; the one that comes first, which is left out.
        sampling: fields of `Sampling`.
        repetition: see `Penalties`.
    """

    prompt: list[int]
    most: int
    until: list[str]
    sampling: dict[str, Any]
    repetition: float = 1.0


class Answers:
    """Answers on every rank of a job; each method is called by all of them with the same arguments.

    Args:
        scorer: scores sequences.
        tokenizer: the model's.
    """

    def __init__(self, scorer: Scorer, tokenizer: HarnessTokenizer):
        self.scorer, self.tokenizer = scorer, tokenizer
        self._end = tokenizer.plain.eod

    def score(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Score]:
        """See `Scorer.score`."""
        return self.scorer.score(pairs)

    def texts(self, requests: Sequence[Continued]) -> list[str]:
        """Continue texts; those of one seed draw other numbers each, by their places among `requests`.

        Raises:
            DataError: a prompt has a token outside of the vocabulary.
            NumericsError: logits are not finite.
        """
        scorer, share = self.scorer, self.scorer.share
        # Each copy of the model generates alone: ranks of `cp` are copies, too.
        model = scorer.model
        model = StagedModel(model.chunks, model.stage_of, model.pp, coded_cache=model.coded_cache)
        mine = range(share.number, len(requests), share.copies)
        longest = max((len(request.prompt) + request.most for request in requests), default=1)
        limits = replace(EngineLimits.of(model, max_length=longest), max_waiting=max(1, len(requests)))
        engine = Engine(model, limits)
        collected = {number: _Collected(requests[number], self.tokenizer) for number in mine}
        if engine.wire.leads:
            for number, one in collected.items():
                (ticket,) = engine.submit([self._wanted(number, requests[number])], [one])
                one.cancel = partial(engine.cancel, ticket)
        engine.run()
        own = {number: one.text for number, one in collected.items()}
        problem = next((one.problem for one in collected.values() if one.problem), "")
        texts: dict[int, str] = {}
        for part in share.gathered(own, problem, scorer.context):
            texts |= {int(number): text for number, text in part.items()}
        return [texts[number] for number in range(len(requests))]

    def _wanted(self, number: int, request: Continued) -> Wanted:
        known = min(self.tokenizer.plain.vocab_size, self.scorer.model.vocab_size)
        return Wanted(
            tuple(request.prompt),
            request.most,
            Sampling(**request.sampling, vocab_size=known),
            number,
            frozenset() if self._end is None else frozenset({self._end}),
            penalties=Penalties(repetition=request.repetition),
        )


class _Collected:
    """Collects the text of a request, and ends the request where a stop string has come."""

    def __init__(self, request: Continued, tokenizer: HarnessTokenizer):
        self.request, self.tokenizer = request, tokenizer
        self.tokens: list[int] = []
        self.cancel: Callable[[], None] = lambda: None
        self.text = self.problem = ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Ended):
            self.problem = event.message
            return
        if not isinstance(event, Token):
            return
        self.tokens.append(event.id)
        whole = self.tokenizer.decode(self.tokens)
        places = [place for stop in self.request.until if stop and (place := whole.find(stop)) >= 0]
        self.text = whole[: min(places)] if places else whole
        if places:
            self.cancel()


class Leading:
    """The first rank's answers: it tells the others what to compute with it, until it closes.

    Args:
        answers: those of this rank.
    """

    def __init__(self, answers: Answers):
        self.answers, self.tokenizer = answers, answers.tokenizer
        self._context = answers.scorer.context
        self._one_call = threading.Lock()
        self._closed = threading.Event()
        self._alone = self._context.world.size == 1
        if not self._alone:
            helper_thread(self._beat, "beat").start()

    @property
    def max_length(self) -> int:
        """The most tokens that the model reads at once."""
        return self.answers.scorer.max_length

    def score(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Score]:
        """See `Scorer.score`."""
        with self._told("score", [[list(part) for part in pair] for pair in pairs]):
            return self.answers.score(pairs)

    def texts(self, requests: Sequence[Continued]) -> list[str]:
        """See `Answers.texts`."""
        with self._told("texts", [asdict(request) for request in requests]):
            return self.answers.texts(requests)

    def close(self, problem: str = "") -> None:
        """Let the other ranks go on; `problem` is what they return from `follow`."""
        if not self._closed.is_set():
            with self._told("close", problem):
                self._closed.set()

    @contextmanager
    def _told(self, what: str, value: object) -> Iterator[None]:
        with self._one_call:
            if not self._alone and not self._closed.is_set():
                broadcast_value(self._context.world, [what, value], self._context.device)
            yield

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT):
            with self._told("wait", None):
                pass


def follow(answers: Answers) -> str:
    """Compute what the first rank tells, on another rank, until it closes; return its problem, or ""."""
    context = answers.scorer.context
    while True:
        what, value = broadcast_value(context.world, None, context.device)
        if what == "close":
            return str(value)
        try:
            if what == "score":
                answers.score([(one, other) for one, other in value])
            if what == "texts":
                answers.texts([Continued(**request) for request in value])
        except MegazeroError:
            # The first rank has the same error, and says it.
            continue
