"""A server's life on the first rank: uvicorn in a thread, the engine in the main one, and an orderly end."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from megazero.errors import ConfigError
from megazero.serving.engine import Engine

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from megazero.serving.http.service import Service

_LAST_WORDS = 0.5  # seconds in which clients are told of a failure


def require_http() -> None:
    """Raise ConfigError unless what serves HTTP is installed."""
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f"`{error.name}` must be installed to serve, but is not; pip install 'megazero[serve]'"
        ) from error
    del starlette, uvicorn


def bound(host: str, port: int) -> socket.socket:
    """Bind the server's address. Raises ConfigError if it is taken or is not this machine's."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"`--host` and `--port` must be a free address of this machine, but {host}:{port} is not: {error}"
        ) from error
    return made


def serve(app: ASGIApp, service: Service, engine: Engine, listening: socket.socket, level: str) -> None:
    """Answer until SIGTERM or Ctrl-C, then finish what was begun; a second signal cancels that too."""
    import uvicorn

    config = uvicorn.Config(app, access_log=False, log_level=level, lifespan="off", timeout_keep_alive=75)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True, name="http")

    def drain(number: int, frame: FrameType | None) -> None:
        if service.draining:
            engine.stop()
        service.draining = True

    previous = {number: signal.signal(number, drain) for number in (signal.SIGTERM, signal.SIGINT)}
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        host, port = listening.getsockname()[:2]
        names = ", ".join(service.settings.names)
        print(f"serving {names} on http://{host}:{port}", file=sys.stderr, flush=True)
        engine.run(until=lambda: not thread.is_alive() or (service.draining and not service.open))
        server.should_exit = True
    except BaseException:
        service.draining = server.should_exit = True
        raise
    finally:
        thread.join(_LAST_WORDS)
        server.force_exit = True
        thread.join(_LAST_WORDS)
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def first_signal_ignored() -> Iterator[None]:
    """Let the first rank decide about the end after SIGTERM or Ctrl-C; a second signal ends this rank."""

    def ignore(number: int, frame: FrameType | None) -> None:
        signal.signal(number, previous[number])

    previous = {number: signal.getsignal(number) for number in (int(signal.SIGTERM), int(signal.SIGINT))}
    for number in previous:
        signal.signal(number, ignore)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
