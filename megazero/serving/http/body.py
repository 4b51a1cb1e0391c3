"""A request's body, read up to a limit."""

from __future__ import annotations

from starlette.requests import Request

from megazero.serving.http.fields import Refusal
from megazero.serving.http.service import HttpSettings


async def read_body(request: Request, settings: HttpSettings) -> bytes:
    """The bytes of a body. Raises Refusal as soon as they are too many."""
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
    return bytes(content)
