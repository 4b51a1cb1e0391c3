"""What answers requests: the engine, its tokenizer and template, and what the server was told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megazero.serving.chat import ChatTemplate
from megazero.serving.engine import Counters, EngineLimits
from megazero.serving.http.metrics import Metrics
from megazero.serving.text import TokenTexts
from megazero.serving.wanted import Listener, Wanted


class TokenSource(Protocol):
    """What the server asks of an engine; see `megazero.serving.engine.Engine`."""

    limits: EngineLimits

    def submit(self, wanted: Sequence[Wanted], listeners: Sequence[Listener]) -> list[int]:
        """Queue requests and return their tickets."""

    def cancel(self, ticket: int) -> None:
        """End a request."""

    @property
    def counters(self) -> Counters:
        """What runs, waits and was done."""


@dataclass(frozen=True)
class HttpSettings:
    """How the server answers.

    Attributes:
        names: the names of the model; answers have the first.
        api_key: what requests must bring as a bearer's token; None for no token.
        body_limit: bytes of a body.
        patience: seconds within which all ranks must have answered, for `/health`.
        ping: seconds without an event after which a stream has a comment, for proxies.
        default_sampling: the values of temperature and so on that a request leaves out.
    """

    names: tuple[str, ...] = ("megazero",)
    api_key: str | None = None
    body_limit: int = 8 << 20
    patience: float = 15.0
    ping: float = 15.0


@dataclass
class Service:
    """An engine that answers.

    Attributes:
        engine: makes tokens.
        texts: its tokenizer.
        end_ids: the tokens that end a text unless a request ignores them.
        first_ids: the tokens in front of every prompt that is a text.
        template: the tokenizer's chat template, None without one.
        since_answer: seconds since all ranks have answered.
        draining: whether new requests are refused.
        open: requests that are being answered.
    """

    engine: TokenSource
    texts: TokenTexts
    end_ids: frozenset[int] = frozenset()
    first_ids: tuple[int, ...] = ()
    template: ChatTemplate | None = None
    settings: HttpSettings = HttpSettings()
    since_answer: Callable[[], float] = lambda: 0.0
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = False
    open: int = 0
    started: int = field(default_factory=lambda: int(time.time()))
