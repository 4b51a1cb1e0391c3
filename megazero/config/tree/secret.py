"""URLs of which a part is secret: no output and no checkpoint shows them whole."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, PlainSerializer

_HIDDEN = "/***"


def hidden(url: str | None) -> str | None:
    """A URL with its host alone, which says where it leads, and no more."""
    return None if url is None else f"https://{urlsplit(url).hostname}{_HIDDEN}"


def _web_address(url: str | None) -> str | None:
    if url is None or url.endswith(_HIDDEN):  # as an earlier run showed it
        return None
    try:
        sound = urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname and url.isprintable()
    except ValueError:
        sound = False
    if not sound or " " in url:
        raise ValueError("must be an address that begins with http:// or https://")
    return url


SecretUrl = Annotated[str | None, AfterValidator(_web_address), PlainSerializer(hidden)]
"""The address of a web server. One that an earlier run has shown, without what is secret, reads as None."""
