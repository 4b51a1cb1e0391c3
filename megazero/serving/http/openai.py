"""OpenAI's endpoints: `/v1/completions` and `/v1/chat/completions`, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megazero.errors import DataError
from megazero.serving.http.answering import Answering, Update
from megazero.serving.http.body import read_body
from megazero.serving.http.fields import CHAT, COMPLETIONS, Refusal, read, shown
from megazero.serving.http.orders import Order, Prompt, make_orders, read_prompts
from megazero.serving.http.service import Service
from megazero.serving.http.shapes import ChatShape, CompletionShape, Scored, Shape, echoed

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class Asked:
    """A request that has been read.

    Attributes:
        shape: how the answer looks.
        orders: the choices to make.
        values: the request's fields.
        ignored: the names of its unknown fields.
    """

    shape: Shape
    orders: Sequence[Order]
    values: Mapping[str, Any]
    ignored: tuple[str, ...]

    @property
    def prompts(self) -> int:
        """The tokens of all prompts."""
        return sum(len(order.prompt.ids) for order in self.orders[:: self.values["n"]])

    @property
    def echo(self) -> bool:
        """Whether choices begin with their prompts."""
        return bool(self.values.get("echo"))

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream's last event tells the usage."""
        return bool((self.values["stream_options"] or {}).get("include_usage"))


class Endpoints:
    """OpenAI's endpoints over one service."""

    def __init__(self, service: Service):
        self.service = service

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        values, ignored = read(await read_body(request, self.service.settings), COMPLETIONS)
        self._check(values)
        if values["best_of"] not in (None, values["n"]):
            raise Refusal("`best_of` must be `n`: all choices that are made are answered", "best_of")
        given = "" if values["prompt"] is None else values["prompt"]
        special = values["add_special_tokens"]
        prompts = await asyncio.to_thread(read_prompts, self.service, given, special=special)
        most, best = values["max_tokens"], values["logprobs"]
        orders = make_orders(
            self.service,
            prompts,
            values,
            count=values["n"],
            max_tokens=16 if most is None else most,
            logprobs=best,
            prompt_logprobs=best if values["echo"] else None,
        )
        shape = CompletionShape(Scored(self.service.texts, best))
        return await self._answer(request, Asked(shape, orders, values, ignored))

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        values, ignored = read(await read_body(request, self.service.settings), CHAT)
        self._check(values)
        if values["top_logprobs"] is not None and not values["logprobs"]:
            raise Refusal("`top_logprobs` must come with `logprobs` true", "top_logprobs")
        if values["continue_final_message"] and values["add_generation_prompt"]:
            raise Refusal(
                "`add_generation_prompt` must be false where `continue_final_message` is true",
                "add_generation_prompt",
            )
        ids = await asyncio.to_thread(self._chat_ids, values)
        best = (values["top_logprobs"] or 0) if values["logprobs"] else None
        most, given = values["max_completion_tokens"], values["max_tokens"]
        orders = make_orders(
            self.service,
            [Prompt(tuple(ids), "")],
            values,
            count=values["n"],
            max_tokens=given if most is None else most,
            logprobs=best,
        )
        shape = ChatShape(Scored(self.service.texts, best))
        return await self._answer(request, Asked(shape, orders, values, ignored))

    def _check(self, values: Mapping[str, Any]) -> None:
        """Raise Refusal for another model's name, or options of a stream without one."""
        names = self.service.settings.names
        if values["model"] not in (None, *names):
            raise Refusal(
                f"`model` must be {' or '.join(names)}, but is {shown(values['model'])}",
                "model",
                status=404,
                code="model_not_found",
            )
        if values["stream_options"] is not None and not values["stream"]:
            raise Refusal("`stream_options` must come with `stream` true", "stream_options")

    def _chat_ids(self, values: Mapping[str, Any]) -> list[int]:
        if self.service.template is None:
            raise Refusal(
                "the tokenizer must have a chat template to answer chats, but has none; use /v1/completions",
                "messages",
            )
        try:
            ids = self.service.template.ids(
                read_messages(values["messages"]),
                template=values["chat_template"],
                variables=values["chat_template_kwargs"],
                prompt=values["add_generation_prompt"],
                resume=values["continue_final_message"],
                special=values["add_special_tokens"],
            )
        except DataError as error:
            raise Refusal(str(error), "messages") from error
        if not ids or max(ids) >= self.service.texts.tokenizer.vocab_size:
            raise Refusal("the chat template must write tokens of this model, but does not", "messages")
        return ids

    async def _answer(self, request: Request, asked: Asked) -> Response:
        """Make the choices and send them."""
        identity = {
            "id": asked.shape.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": self.service.settings.names[0],
        }
        headers = {"X-Ignored-Fields": ", ".join(asked.ignored).encode("ascii", "replace").decode()[:500]}
        headers = headers if asked.ignored else {}
        texts, prompts = self.service.texts, [order.prompt.ids for order in asked.orders]
        starts = [len(echoed(texts, ids, None)[0]) for ids in prompts] if asked.echo else None
        answering = Answering(self.service, asked.orders, starts)
        if asked.values["stream"]:
            return EventStream(answering, self._events(asked, answering, identity, request), headers)
        done = await answering.finished(request)
        choices: list[dict[str, Any]] = []
        for order, choice in zip(asked.orders, done, strict=True):
            echo = ""
            if asked.echo:
                text, tokens = echoed(texts, order.prompt.ids, choice.scores)
                echo, choice.tokens = order.prompt.text or text, [*tokens, *choice.tokens]
            choices.append(asked.shape.choice(len(choices), choice, echo))
        body = {
            **identity,
            "object": asked.shape.whole,
            "choices": choices,
            "usage": _usage(asked, answering),
        }
        _note(request, asked, answering)
        return JSONResponse(body, headers=headers)

    async def _events(
        self, asked: Asked, answering: Answering, identity: Mapping[str, Any], request: Request
    ) -> AsyncIterator[bytes]:
        """The events of a stream."""

        def event(choices: list[Any], **more: Any) -> bytes:
            null = {"usage": None} if asked.usage_at_end else {}
            return _event({**identity, "object": asked.shape.part, "choices": choices, **null, **more})

        shape, waiting = asked.shape, asked.echo and asked.shape.scored.best is not None
        for i, order in enumerate(asked.orders):
            for opening in shape.opening(i):
                yield event([opening])
            if asked.echo and not waiting:
                text = order.prompt.text or echoed(self.service.texts, order.prompt.ids, None)[0]
                yield event([shape.delta(i, text, (), None)])
        try:
            async for update in answering.updates(self.service.settings.ping):
                if update is None:
                    yield b": waiting\n\n"
                    continue
                if update.scores is not None:
                    if waiting:
                        order = asked.orders[update.index]
                        text, tokens = echoed(self.service.texts, order.prompt.ids, update.scores)
                        yield event([shape.delta(update.index, order.prompt.text or text, tokens, None)])
                    continue
                for choice in _deltas(shape, update, asked.shape.scored.best is not None):
                    yield event([choice])
            if asked.usage_at_end:
                yield event([], usage=_usage(asked, answering))
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:
            yield _event(refusal.body)
        finally:
            _note(request, asked, answering)


class EventStream(StreamingResponse):
    """A stream of server-sent events; its choices are cancelled if nobody reads it any more."""

    def __init__(self, answering: Answering, events: AsyncIterator[bytes], headers: Mapping[str, str]):
        more = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers={**headers, **more})
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answering.close()


def read_messages(given: object) -> list[dict[str, Any]]:
    """The turns of a chat, their contents as strings. Raises Refusal unless they are turns of text."""
    if not isinstance(given, list) or not given:
        raise Refusal(f"`messages` must be a list with a message, but is {shown(given)}", "messages")
    messages = []
    for message in given:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise Refusal(
                f"`messages` must be objects with a role of {', '.join(_ROLES)}, but one is {shown(message)}",
                "messages",
            )
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            kinds = {part.get("type") for part in content if isinstance(part, dict)}
            content = "\n".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
            content = content if kinds <= {"text"} else None
        if not isinstance(content, str):
            raise Refusal(
                "`messages` must have a `content`, a string or a list of {type: text, text}, but one is "
                f"{shown(message.get('content'))}",
                "messages",
            )
        messages.append({**message, "content": content})
    return messages


def _deltas(shape: Shape, update: Update, scored: bool) -> list[dict[str, Any]]:
    """The choices of the events of an update: a chat's reason has an event of its own."""
    text, tokens = update.piece.text, update.piece.tokens if scored else ()
    choices = [shape.delta(update.index, text, tokens, None)] if text or tokens else []
    if update.reason is not None:
        choices.append(shape.delta(update.index, "", (), update.reason))
    return choices


def _event(body: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _usage(asked: Asked, answering: Answering) -> dict[str, int]:
    return {
        "prompt_tokens": asked.prompts,
        "completion_tokens": answering.made,
        "total_tokens": asked.prompts + answering.made,
    }


def _note(request: Request, asked: Asked, answering: Answering) -> None:
    """Leave the number of tokens for the line in the log."""
    request.state.tokens = asked.prompts, answering.made
