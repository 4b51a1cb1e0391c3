"""The engine with its tokenizer and template, and what the server was told: all that answers share."""

from __future__ import annotations

import time
from dataclasses import dataclass

from megazero.serving.chat import ChatTemplate
from megazero.serving.engine import Engine
from megazero.serving.http.metrics import Metrics
from megazero.serving.text import TokenTexts


@dataclass(frozen=True)
class HttpSettings:
    """How the server answers.

    Attributes:
        names: the names of the model; answers have the first.
        api_key: what requests must bring as a bearer's token; None for no token.
        body_limit: bytes of a body.
        patience: seconds within which all ranks must have answered, for `/health`.
        ping: seconds without an event after which a stream has a comment, for proxies.
    """

    names: tuple[str, ...] = ("megazero",)
    api_key: str | None = None
    body_limit: int = 8 << 20
    patience: float = 15.0
    ping: float = 15.0


class Service:
    """An engine that answers.

    Args:
        engine: makes tokens.
        texts: its tokenizer.
        settings: how to answer.
        end_ids: the tokens that end a text unless a request ignores them.
        first_ids: the tokens in front of every prompt that is a text.
        template: the tokenizer's chat template, None without one.
    """

    def __init__(
        self,
        engine: Engine,
        texts: TokenTexts,
        settings: HttpSettings | None = None,
        *,
        end_ids: frozenset[int] = frozenset(),
        first_ids: tuple[int, ...] = (),
        template: ChatTemplate | None = None,
    ):
        self.engine, self.texts, self.settings = engine, texts, settings or HttpSettings()
        self.end_ids, self.first_ids, self.template = end_ids, first_ids, template
        self.metrics, self.started = Metrics(), int(time.time())
        self.draining = False
        """Whether new requests are refused."""
        self.open = 0
        """Requests that are being answered."""
