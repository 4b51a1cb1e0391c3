"""A client in the process of an application over the stand-in engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.simple import ByteLevelTokenizer
from megazero.serving.chat import ChatTemplate
from megazero.serving.engine import EngineLimits
from megazero.serving.http.app import make_app
from megazero.serving.http.service import HttpSettings, Service
from megazero.serving.text import TokenTexts
from tests.serving.fake import FakeEngine, Script, repeated


@dataclass
class Site:
    """A server in this process."""

    engine: FakeEngine
    service: Service
    app: Any
    ended: list[bool]

    def run(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        """What `work` gives for a client."""

        async def main() -> Any:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await work(client)

        return asyncio.run(main())

    def ask(
        self, path: str, body: object = None, method: str | None = None, **options: Any
    ) -> httpx.Response:
        """Send one request; a body that is bytes as it is, else as JSON."""
        given = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}
        verb = method or ("GET" if body is None else "POST")
        return self.run(lambda client: client.request(verb, path, **given, **options))


@contextmanager
def site(
    script: Script = repeated,
    *,
    tokenizer: Tokenizer | None = None,
    template: Path | None = None,
    limits: EngineLimits | None = None,
    paused: bool = False,
    terminate: bool = False,
    **settings: Any,
):
    """A server over the stand-in engine that makes a script's tokens."""
    tokenizer = tokenizer or ByteLevelTokenizer()
    engine = FakeEngine(script, limits, paused=paused)
    engine.vocabulary = tokenizer.vocab_size
    ends = frozenset() if tokenizer.eod is None else frozenset({tokenizer.eod})
    chat = None if template is None else ChatTemplate(str(template))
    texts = TokenTexts(tokenizer)
    options = HttpSettings(("tiny", "other"), **settings)
    service = Service(engine, texts, options, end_ids=ends, template=chat)
    ended: list[bool] = []
    try:
        yield Site(
            engine, service, make_app(service, (lambda: ended.append(True)) if terminate else None), ended
        )
    finally:
        engine.close()


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream; its end must be `[DONE]`, and each an object of JSON."""
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    lines = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert all(block.startswith(("data: ", ":")) for block in blocks)
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
