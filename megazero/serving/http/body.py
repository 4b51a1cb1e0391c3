"""A request's body, read up to a limit, as an object."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from megazero.serving.http.fields import Refusal, parse
from megazero.serving.http.service import HttpSettings


async def read_body(request: Request, settings: HttpSettings) -> dict[str, Any]:
    """The object of a body. Raises Refusal as soon as it is too long, or unless it is one of JSON."""
    content = bytearray()
    length = request.headers.get("content-length", "")
    expected = int(length) if length.isascii() and length.isdigit() else 0
    if expected <= settings.body_limit:
        async for part in request.stream():
            content += part
            if len(content) > settings.body_limit:
                break
    if max(expected, len(content)) > settings.body_limit:
        raise Refusal(
            f"the body must have at most {settings.body_limit} bytes, but has more; send fewer prompts",
            status=413,
            code="request_too_large",
        )
    return parse(bytes(content))
