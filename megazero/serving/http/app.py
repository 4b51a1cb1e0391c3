"""The application: which path is answered by what, who may ask, what is logged, and how errors are sent."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megazero.errors import printable
from megazero.serving.http.answering import Answering, ClientGone
from megazero.serving.http.body import read_body
from megazero.serving.http.fields import Refusal
from megazero.serving.http.megatron import api
from megazero.serving.http.mii import mii_answer, mii_orders
from megazero.serving.http.openai import Endpoints
from megazero.serving.http.service import Service

LOG = logging.getLogger("megazero.serve")
_PAGE = Path(__file__).with_name("page.html")
_OPEN = ("/", "/health", "/healthz", "/ping")  # what is answered without a token
_GONE = 499  # as nginx notes it; nobody reads it


def make_app(service: Service, terminate: Callable[[], None] | None = None) -> ASGIApp:
    """Make the application. terminate: ends the server for MII's clients; None if nobody may ask for it."""
    endpoints = Endpoints(service)

    async def page(request: Request) -> Response:
        return FileResponse(_PAGE, media_type="text/html; charset=utf-8")

    async def health(request: Request) -> Response:
        late = time.monotonic() - service.engine.answered
        if late > service.settings.patience:
            raise Refusal(f"all ranks must answer, but have not for {late:.0f} s", status=503)
        return JSONResponse({"status": "draining" if service.draining else "ok"})

    async def metrics(request: Request) -> Response:
        text = service.metrics.text(service.engine.counters, service.settings.names[0])
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(request: Request) -> Response:
        limit = service.engine.limits.max_length
        rows = [
            {
                **{"id": name, "object": "model", "created": service.started, "owned_by": "megazero"},
                "max_model_len": limit,
            }
            for name in service.settings.names
        ]
        wanted = request.path_params.get("model")
        if wanted is None:
            return JSONResponse({"object": "list", "data": rows})
        for row in rows:
            if row["id"] == wanted:
                return JSONResponse(row)
        raise Refusal(
            f"the model `{wanted}` must be served, but is not", "model", status=404, code="model_not_found"
        )

    async def megatron(request: Request) -> Response:
        return await api(service, request)

    async def mii(request: Request) -> Response:
        body = await read_body(request, service.settings)
        orders, values = await asyncio.to_thread(mii_orders, service, body)
        done = await Answering(service, orders).finished(request)
        full = values["return_full_text"]
        return JSONResponse(mii_answer([order.prompt for order in orders], done, full))

    async def end(request: Request) -> Response:
        assert terminate is not None, "else there is no such path"
        terminate()
        return JSONResponse({"status": "draining"})

    routes = [
        Route("/", page),
        *(Route(path, health) for path in ("/health", "/healthz", "/ping")),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", models),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/api", megatron, methods=["PUT"]),
        Route("/mii/{name:path}", mii, methods=["POST"]),
        *([] if terminate is None else [Route("/terminate", end, methods=["POST"])]),
    ]
    handlers = {Refusal: _refused, HTTPException: _no_such_path, ClientGone: _gone, ClientDisconnect: _gone}
    app = Starlette(routes=routes, exception_handlers={**handlers, Exception: _failed})
    app.router.redirect_slashes = False
    return Gate(app, service)


class Gate:
    """Lets in who has the token, and logs one line for each request, without its text.

    Args:
        app: what answers.
        service: whose settings count.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), _GONE
        state = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refusal = self._refusal(Request(scope))
            answer = self.app if refusal is None else answer_of(refusal)
            await answer(scope, receive, noted)
        finally:
            prompt, made = state.get("tokens", (0, 0))
            milliseconds = 1000 * (time.monotonic() - began)
            path = printable(scope["path"], kept="")[:80]
            text = "%s %s %s %d %.0f ms, %d tokens in, %d out"
            client = (scope.get("client") or ("-",))[0]
            LOG.info(text, client, scope["method"], path, status, milliseconds, prompt, made)

    def _refusal(self, request: Request) -> Refusal | None:
        key = self.service.settings.api_key
        if key is None or request.url.path in _OPEN:
            return None
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return None
        return Refusal(
            "the header `Authorization` must be `Bearer` and the server's key, but is not",
            status=401,
            code="invalid_api_key",
        )


def answer_of(refusal: Refusal) -> Response:
    """A refusal as a response."""
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    return JSONResponse(refusal.body, status_code=refusal.status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal), "the handler of this class"
    return answer_of(error)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "the handler of this class"
    text = f"`{request.method} {request.url.path}` must be one of this server's paths, but: {error.detail}"
    return answer_of(Refusal(text, status=error.status_code))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_GONE)


async def _failed(request: Request, error: Exception) -> Response:
    return answer_of(Refusal("the server failed; its log says why", status=500))
