"""One request's choices, from the engine's thread to the server's loop, until they end or nobody waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from megazero.errors import MegazeroError
from megazero.serving.engine import Completed, QueueFullError
from megazero.serving.http.fields import Refusal
from megazero.serving.http.orders import Order
from megazero.serving.http.service import Service
from megazero.serving.text import ChoiceText, Decoder, Piece, Shown
from megazero.serving.wanted import Ended, Event, Listener, PromptScores, Token

_LOOK = 0.25  # seconds between looks whether the client is still there


_NO_PIECE = Piece()


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Update:
    """News of a choice. reason: why it has ended; None while it goes on."""

    index: int
    piece: Piece = _NO_PIECE
    scores: PromptScores | None = None
    reason: str | None = None


@dataclass
class Finished:
    """A whole choice. count: the tokens that were made, those behind a stop string not among them."""

    text: str = ""
    tokens: list[Shown] = field(default_factory=list)
    scores: PromptScores | None = None
    reason: str = "length"
    count: int = 0


def text_of(service: Service, order: Order, start: int = 0) -> ChoiceText:
    """The text of an order, which begins at the character `start`."""
    prompt, skip = order.prompt, order.skip_special
    decoder = Decoder(service.texts, prompt.ids, skip_special=skip, complete=prompt.text is not None)
    return ChoiceText(decoder, order.rule, service.texts.special, start)


def whole_text(service: Service, order: Order, completed: Completed) -> Finished:
    """The text of an order whose tokens are all there."""
    choice, pieces = text_of(service, order), [Piece()]
    for token in completed.tokens:
        pieces.append(choice.add(token, silent=token.id in order.wanted.stop_ids))
        if pieces[-1].ended:
            break
    else:
        pieces.append(choice.finish())
    reason = "stop" if pieces[-1].ended else completed.reason
    return Finished("".join(piece.text for piece in pieces), reason=reason, count=choice.count)


class Answering:
    """The choices of a request, which begin at once.

    Args:
        service: the engine and its tokenizer.
        orders: the choices.
        starts: the place of the first character of each, behind an echoed prompt.

    Raises:
        Refusal: the queue is full, or a choice does not fit.
    """

    def __init__(self, service: Service, orders: Sequence[Order], starts: Sequence[int] | None = None):
        self._service, self._orders = service, orders
        places = starts or [0] * len(orders)
        self.texts = [text_of(service, order, at) for order, at in zip(orders, places, strict=True)]
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open = set(range(len(orders)))
        self._began, self._first = time.monotonic(), [0.0] * len(orders)
        if service.draining:
            raise Refusal("the server ends; send this to another one", status=503, retry_after=5)
        loop = asyncio.get_running_loop()

        def listener(index: int) -> Listener:
            def put(event: Event) -> None:
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

            return put

        try:
            self._tickets = service.engine.submit(
                [order.wanted for order in orders], [listener(i) for i in range(len(orders))]
            )
        except QueueFullError as error:
            raise Refusal(str(error), status=429, code="queue_full", retry_after=1) from error
        except MegazeroError as error:
            raise Refusal(str(error), code="context_length_exceeded") from error
        self._closed = False
        service.open += 1

    @property
    def made(self) -> int:
        """The tokens of all choices so far."""
        return sum(text.count for text in self.texts)

    async def updates(self, pause: float) -> AsyncIterator[Update | None]:
        """Give what happens, until all choices have ended; None after each `pause` seconds without news.

        Choices that are open when the caller leaves are cancelled.

        Raises:
            Refusal: the engine has failed or ends.
        """
        try:
            while self._open:
                try:
                    waiting = self._queue.empty()
                    event_of = asyncio.wait_for(self._queue.get(), pause) if waiting else self._queue.get()
                    index, event = await event_of
                except asyncio.TimeoutError:
                    yield None
                    continue
                if index in self._open and (update := self._take(index, event)) is not None:
                    yield update
        finally:
            self.close()

    async def finished(self, request: Request) -> list[Finished]:
        """All choices, whole.

        Raises:
            ClientGone: the client has left; its choices are cancelled.
            Refusal: the engine has failed or ends.
        """
        done = [Finished() for _ in self._orders]
        looked = time.monotonic()
        updates = self.updates(_LOOK)
        try:
            async for update in updates:
                if time.monotonic() - looked > _LOOK:
                    looked = time.monotonic()
                    if await request.is_disconnected():
                        raise ClientGone
                if update is None:
                    continue
                choice = done[update.index]
                choice.text += update.piece.text
                choice.tokens += update.piece.tokens
                choice.scores = update.scores or choice.scores
                choice.reason = update.reason or choice.reason
        finally:
            await updates.aclose()  # type: ignore[attr-defined]
        for choice, text in zip(done, self.texts, strict=True):
            choice.count = text.count
        return done

    def close(self) -> None:
        """Cancel what has not ended; a second call has no effect."""
        if self._closed:
            return
        self._closed = True
        for index in self._open:
            self._service.engine.cancel(self._tickets[index])
            self._note(index, "abort")
        self._open.clear()
        self._service.open -= 1

    def _take(self, index: int, event: Event) -> Update | None:
        text = self.texts[index]
        if isinstance(event, PromptScores):
            return Update(index, scores=event)
        if isinstance(event, Token):
            self._first[index] = self._first[index] or time.monotonic()
            piece = text.add(event, silent=event.id in self._orders[index].wanted.stop_ids)
            if piece.ended:
                self._end(index, "stop")
                self._service.engine.cancel(self._tickets[index])
                return Update(index, piece, reason="stop")
            return Update(index, piece) if piece.text or piece.tokens else None
        assert isinstance(event, Ended), "the last kind of event"
        if event.reason in ("cancelled", "error"):
            self._end(index, "abort")
            raise Refusal(event.message or "the server ends", status=500 if event.reason == "error" else 503)
        piece = text.finish()
        reason = "stop" if piece.ended else event.reason
        self._end(index, reason)
        return Update(index, piece, reason=reason)

    def _end(self, index: int, reason: str) -> None:
        self._open.discard(index)
        self._note(index, reason)

    def _note(self, index: int, reason: str) -> None:
        first = self._first[index] - self._began if self._first[index] else None
        seconds = time.monotonic() - self._began
        self._service.metrics.finished(reason, self.texts[index].count, first, seconds)
