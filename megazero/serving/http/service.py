"""The engine with its tokenizer and template, and what the server was told: all that answers share."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.library import LibraryTokenizer
from megazero.errors import DataError
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


def make_service(
    folder: str,
    tokenizer: Tokenizer,
    engine: Engine,
    settings: HttpSettings | None,
    template: str | None = None,
) -> Service:
    """Return the service for the model of a folder.

    Args:
        template: the file of a chat template; None for the tokenizer's own.

    Raises:
        DataError: the template cannot be read.
    """
    foreign = (Path(folder) / "config.json").is_file()
    ends = set() if tokenizer.eod is None else {tokenizer.eod}
    source = tokenizer.source if isinstance(tokenizer, LibraryTokenizer) else None
    return Service(
        engine,
        TokenTexts(tokenizer),
        settings,
        end_ids=frozenset(ends | (_ends_beside(Path(folder), tokenizer.vocab_size) if foreign else set())),
        first_ids=first_ids(tokenizer) if foreign else (),
        template=None if source is None else ChatTemplate(str(source), template),
    )


def _ends_beside(folder: Path, vocabulary: int) -> set[int]:
    """The ids that end a text by a folder of Hugging Face's; there may be several."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        try:
            said = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"`{folder / name}` must be an object of JSON, but is not ({error})") from error
        ends |= {i for i in (said if isinstance(said, list) else [said]) if type(i) is int}
    return {i for i in ends if 0 <= i < vocabulary}


def first_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that a tokenizer.json puts in front of a text, such as <s>; often none."""
    if not isinstance(tokenizer, LibraryTokenizer):
        return ()
    processor = tokenizer.definition().get("post_processor") or {}
    steps = processor.get("processors", [processor])
    template: dict[str, Any] = next(
        (step for step in steps if step.get("type") == "TemplateProcessing"), {"single": []}
    )
    ids: list[int] = []
    for part in template["single"]:
        if "Sequence" in part:
            break
        ids += template["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return tuple(ids)
