"""`Engine`: answers many requests at once on the ranks of a model; `complete`: a fixed list of them.

The first rank takes requests and decides. For each step it tells the other ranks a plan; all compute it, and
the first draws the tokens, which the others learn of by the next plan. No rank decides by a clock, by its
memory or by its own numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megazero.errors import ConfigError, NumericsError
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.ops.attention import varying_shapes
from megazero.serving.limits import EngineLimits, QueueFullError
from megazero.serving.pages import PagePool
from megazero.serving.plan import Part, Plan, Reads, Relay
from megazero.serving.runner import Computed, Runner, paged
from megazero.serving.sampled import Row, draw, scored_token
from megazero.serving.scheduler import Piece, Scheduler
from megazero.serving.scheduler import Sequence as Growing
from megazero.serving.wanted import Ended, Event, Listener, PromptScores, Reason, Token, Wanted

__all__ = ["Completed", "Counters", "Engine", "EngineLimits", "QueueFullError", "complete"]

_BEAT = 1.0
"""Seconds after which idle ranks are sent a plan without parts, so that all are known to be there."""
_NAP = 0.05
"""Seconds after which an idle leading rank asks `until()` again."""


@dataclass(frozen=True)
class Counters:
    """Counts of an engine's work, now and so far.

    Attributes:
        running, waiting: requests now.
        pages_used, pages: pages that requests hold, and all pages.
        prompt_tokens, generated_tokens: of all requests so far.
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
    """A request's tokens, what ended it, and the scores of its prompt if it asked for them."""

    tokens: tuple[Token, ...]
    reason: Reason
    prompt_scores: PromptScores | None = None


class Engine:
    """Answers requests; every rank of the model makes one.

    Args:
        model: the model, without sequence parallelism.
        limits: bounds of memory and steps; None for those of `EngineLimits.of`.

    Raises:
        ConfigError: the model is sequence-parallel, or has learned positions for fewer tokens than a request
            may have.
    """

    def __init__(self, model: StagedModel[Batch], limits: EngineLimits | None = None):
        self.model, self.limits = model, limits or EngineLimits.of(model)
        _check(model, self.limits)
        placement = model.placement
        groups = (placement.tp, placement.groups["ep"], model.sharers, model.pp)
        self.wire = Relay(groups, model.device)
        self._runner = Runner(model, self.limits.pages, self.limits.page)
        self._scheduler = Scheduler(
            PagePool(self.limits.pages, self.limits.page),
            tokens=self.limits.tokens_per_step,
            most=self.limits.max_running,
            reuse=paged(model),
        )
        self._live: dict[int, Growing] = {}
        self._news = threading.Condition()
        self._arrived: list[Growing] = []
        self._cancelled: list[int] = []
        self._tickets = 0
        self._stopped = False
        self._counters = Counters(pages=self.limits.pages)
        self.answered = time.monotonic()
        """When all ranks were last known to be there, by `time.monotonic`."""

    def submit(self, wanted: Sequence[Wanted], listeners: Sequence[Listener]) -> list[int]:
        """Queue requests, on the leading rank and from any thread; return their tickets.

        What prompts have in common from their beginning, of these requests and others, is computed once.

        Raises:
            ConfigError: a request is longer than the context or all pages.
            DataError: a request has a token outside of the vocabulary.
            QueueFullError: too many requests wait, or the engine has stopped; none of these is queued.
        """
        for request in wanted:
            self.limits.check(self.model, request)
        with self._news:
            if self._stopped:
                raise QueueFullError(
                    "`engine` must be running to take requests, but has stopped; start another"
                )
            waiting = self._counters.waiting + len(self._arrived) + len(wanted)
            if waiting > self.limits.max_waiting:
                raise QueueFullError(
                    f"`waiting requests` must be at most {self.limits.max_waiting}, but would be {waiting}; "
                    "ask again later"
                )
            tickets = list(range(self._tickets, self._tickets + len(wanted)))
            self._tickets += len(wanted)
            for ticket, request, listener in zip(tickets, wanted, listeners, strict=True):
                self._arrived.append(Growing(ticket, request, listener))
            self._news.notify()
        return tickets

    def cancel(self, ticket: int) -> None:
        """End a request before the next step, on the leading rank, from any thread; ended ones are left."""
        with self._news:
            self._cancelled.append(ticket)
            self._news.notify()

    def stop(self) -> None:
        """End the loop on every rank, on the leading rank and from any thread; requests end as cancelled."""
        with self._news:
            self._stopped = True
            self._news.notify()

    @property
    def counters(self) -> Counters:
        """Counts of the engine's work, now and so far."""
        return self._counters

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Answer requests until none is left and `until()`, or `stop`; other ranks follow the leading one.

        An error ends all requests with its message and is raised.
        """
        with torch.inference_mode(), varying_shapes():
            if not self.wire.leads:
                while not (plan := self.wire.share(Plan())).last:
                    self._compute(plan)
                return
            try:
                while self._wait(until):
                    self._step()
            except BaseException as error:
                self._stopped = True
                self._end_all(Ended("error", str(error) or type(error).__name__))
                raise
            self._end_all(Ended("cancelled"))
            self.wire.share(Plan(dropped=self._dropped(), last=True))

    def check(self) -> None:
        """Raise AssertionError unless pages, queue and order are sound."""
        self._scheduler.check()

    def _wait(self, until: Callable[[], bool] | None) -> bool:
        """Take what has arrived, and return whether to go on; wait for it if there is nothing to do."""
        while not self._stopped:
            with self._news:
                arrived, self._arrived = self._arrived, []
                cancelled, self._cancelled = self._cancelled, []
                for sequence in arrived:
                    self._live[sequence.ticket] = sequence
                    self._scheduler.waiting.append(sequence)
                self._count(prompt=sum(len(sequence.wanted.prompt) for sequence in arrived))
            for ticket in cancelled:
                if ticket in self._live:
                    self._end(self._live[ticket], Ended("cancelled"))
            if self._live:
                return True
            if (until is None or until()) and not self._arrived:
                return False
            if self.wire.groups and time.monotonic() - self.answered > _BEAT:
                self._compute(self.wire.share(Plan(dropped=self._dropped())))
            with self._news:
                if not (self._arrived or self._cancelled or self._stopped):
                    self._news.wait(_NAP)
        return False

    def _step(self) -> None:
        """Plan, compute and tell one step."""
        pieces = self._scheduler.plan()
        parts = [_part(piece) for piece in pieces]
        computed = self._compute(self.wire.share(Plan(parts, self._dropped())))
        self._scheduler.advance(pieces)
        for piece, part, scores in zip(pieces, parts, computed.scores, strict=True):
            if part.reads.scored:
                _score(piece.sequence, part, scores)
            if piece.sequence.scoring and not piece.sequence.left:
                piece.sequence.scored = True
                piece.sequence.listener(PromptScores(tuple(piece.sequence.scores)))
        drawing = [piece.sequence for piece, part in zip(pieces, parts, strict=True) if part.reads.draws]
        self._draw(drawing, computed.logits)
        for piece in pieces:
            if not piece.sequence.wanted.max_tokens and not piece.sequence.left:
                self._end(piece.sequence, Ended("length"))
        self._count()

    def _compute(self, plan: Plan) -> Computed:
        computed = self._runner(plan)
        if not plan.parts:
            self.wire.meet()
        self.answered = time.monotonic()
        return computed

    def _draw(self, sequences: Sequence[Growing], logits: Tensor) -> None:
        """Draw the next token of each sequence from its row of logits, tell it, and end what it ends."""
        if not sequences:
            return
        if not bool(logits.sum().isfinite()):
            finite = logits.isfinite().all(dim=-1)
            for sequence, good in zip(sequences, finite.tolist(), strict=True):
                if not good:
                    self._end(sequence, Ended("error", _not_finite(sequence)))
            sequences = [one for one, good in zip(sequences, finite.tolist(), strict=True) if good]
            logits = logits[finite]
        tokens = draw(logits, [Row(sequence.wanted, sequence.tokens) for sequence in sequences])
        self._count(generated=len(tokens))
        for sequence, token in zip(sequences, tokens, strict=True):
            wanted = sequence.wanted
            sequence.tokens.append(token.id)
            sequence.listener(token)
            if token.id in wanted.stop_ids:
                self._end(sequence, Ended("stop"))
            elif len(sequence.tokens) == len(wanted.prompt) + wanted.max_tokens:
                self._end(sequence, Ended("length"))

    def _end(self, sequence: Growing, ended: Ended) -> None:
        del self._live[sequence.ticket]
        self._scheduler.end(sequence)
        sequence.listener(ended)

    def _end_all(self, ended: Ended) -> None:
        with self._news:
            arrived, self._arrived = self._arrived, []
        for sequence in tuple(self._live.values()):
            self._end(sequence, ended)
        for sequence in arrived:
            sequence.listener(ended)
        self._count()

    def _dropped(self) -> list[int]:
        dropped, self._scheduler.dropped = self._scheduler.dropped, []
        return dropped

    def _count(self, prompt: int = 0, generated: int = 0) -> None:
        scheduler, before = self._scheduler, self._counters
        self._counters = replace(
            before,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=scheduler.pool.pages - scheduler.pool.free,
            prompt_tokens=before.prompt_tokens + prompt,
            generated_tokens=before.generated_tokens + generated,
            preemptions=scheduler.preemptions,
            cached_tokens=scheduler.cached_tokens,
        )


def _part(piece: Piece) -> Part:
    """Make the part of a plan that a piece is."""
    sequence, wanted = piece.sequence, piece.sequence.wanted
    past, prompt = sequence.computed, len(wanted.prompt)
    end = past + piece.count
    scored = max(0, min(end, prompt - 1) - past) if sequence.scoring else 0
    tokens = sequence.tokens[past : end + (scored == piece.count)]
    draws = int(end == len(sequence.tokens) and wanted.max_tokens > 0)
    reads = Reads(draws, scored, wanted.prompt_logprobs or 0)
    room = prompt + wanted.max_tokens
    return Part(sequence.ticket, past, piece.count, room, reads, tokens, piece.pages)


def _score(sequence: Growing, part: Part, scores: Tensor) -> None:
    """Add the scores of a part's rows to those of the prompt, unless it has them from before."""
    following = sequence.wanted.prompt[part.past + 1 : part.past + 1 + part.reads.scored]
    for at, (token, score) in enumerate(zip(following, scores.tolist(), strict=True), part.past + 1):
        if at == len(sequence.scores):
            sequence.scores.append(scored_token(token, score, part.reads.best))


def _not_finite(sequence: Growing) -> str:
    return (
        f"`logits` must be finite, but those at position {len(sequence.tokens)} of the request are not; were "
        "the weights trained until they diverged?"
    )


def _check(model: StagedModel[Batch], limits: EngineLimits) -> None:
    if model.placement.sequence_parallel:
        raise ConfigError(
            "`sequence_parallel` must be off to generate, but is on; pass "
            "`model.without_sequence_parallelism()`, which has the same weights"
        )
    learned = model.spec.embedding.positions > 0
    sparse = any(attention.sight.sparse for attention in model.spec.attentions())
    if (learned or sparse) and limits.max_length > model.spec.positions:
        raise ConfigError(
            f"`max_length` must be at most {model.spec.positions}, the model's positions, but is "
            f"{limits.max_length}; set less"
        )


def complete(
    model: StagedModel[Batch], wanted: Sequence[Wanted], limits: EngineLimits | None = None
) -> list[Completed]:
    """Answer requests; every rank of the model calls this with the same arguments and returns the same.

    Args:
        model: the model, without sequence parallelism.
        wanted: the requests.
        limits: bounds of memory and steps, except of how many wait; None for pages of half a gibibyte.

    Raises:
        ConfigError: a request is longer than the limits allow.
        DataError: a request has a token outside of the vocabulary.
        NumericsError: the model's logits are not finite.
    """
    if limits is None:
        longest = max((len(one.prompt) + one.max_tokens for one in wanted), default=1)
        limits = EngineLimits.of(model, max_length=longest)
    engine = Engine(model, replace(limits, max_waiting=max(1, len(wanted))))
    for request in wanted:
        limits.check(model, request)
    events: list[list[Event]] = [[] for _ in wanted]
    if engine.wire.leads:
        engine.submit(wanted, [mine.append for mine in events])
    engine.run()
    answers = engine.wire.value([_plain(mine) for mine in events])
    for *_, reason, message in answers:
        if reason == "error":
            raise NumericsError(message)
    return [_completed(*answer) for answer in answers]


_Plain = Sequence[tuple[int, float | None, Sequence[tuple[int, float]], float] | None]


def _plain(events: Sequence[Event]) -> tuple[_Plain, _Plain | None, Reason, str] | None:
    """A request's tokens, its prompt's if they are scored, the reason of its end and the message."""
    if not events:
        return None  # on ranks that are told by the leading one
    tokens = [event for event in events if isinstance(event, Token)]
    prompt: _Plain | None = None
    for event in events:
        if isinstance(event, PromptScores):
            prompt = event.tokens
    ended = events[-1]
    assert isinstance(ended, Ended), "the last event is the end"
    return tokens, prompt, ended.reason, ended.message


def _completed(tokens: _Plain, prompt: _Plain | None, reason: Reason, _: str) -> Completed:
    def told(plain: _Plain) -> tuple[Token | None, ...]:
        return tuple(
            one and Token(one[0], one[1], tuple((i, log) for i, log in one[2]), one[3]) for one in plain
        )

    drawn = tuple(token for token in told(tokens) if token is not None)
    return Completed(drawn, reason, None if prompt is None else PromptScores(told(prompt)))
