"""`--watch`: serves the page on 127.0.0.1 while its runs go on; nobody else gets to see it."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from megazero.errors import ConfigError, DataError
from megazero.report.page import encoded, page_of, read_runs
from megazero.report.run import Json, Source

HOST = "127.0.0.1"


class Watched:
    """The runs as they are now; several requests may ask at once.

    Attributes:
        token: a random word that the page's address has, without which nothing is answered.
    """

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources
        self._lock = threading.Lock()
        self.token = secrets.token_urlsafe(16)

    def now(self) -> Json:
        """Return what the page shows, with a revision that changes whenever anything of it does.

        Raises:
            DataError: the metrics of a run cannot be read.
        """
        with self._lock:
            shown = read_runs(self._sources)
        return {**shown, "revision": hashlib.sha256(encoded(shown["runs"])).hexdigest()}


def serve(sources: Sequence[Source], port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted; `say` receives the address.

    Raises:
        ConfigError: the port is taken.
        DataError: the metrics of a run cannot be read.
    """
    watched = Watched(sources)
    watched.now()
    with open_server(watched, port) as server:
        say(f"http://{HOST}:{server.server_port}/?token={watched.token}")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def open_server(watched: Watched, port: int) -> ThreadingHTTPServer:
    """Open the server; port 0 takes one that is free.

    Raises:
        ConfigError: the port is taken.
    """
    try:
        return ThreadingHTTPServer((HOST, port), lambda *arguments: _Handler(watched, *arguments))
    except OSError as error:
        raise ConfigError(
            f"`--port` must be free, but {port} is not ({error.strerror}); choose another, or 0 for any"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    """Answers for the page and for its data, if both the token and the Host header are right.

    A page of another origin does not know the token; one whose name was pointed here has another Host.
    """

    def __init__(self, watched: Watched, *arguments: object):
        self._watched = watched
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer a request."""
        address, port = urlsplit(self.path), self.connection.getsockname()[1]
        query = dict(parse_qsl(address.query))
        token = query.get("token", "")
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(403, b"this host is not served\n")
        elif not secrets.compare_digest(token.encode(), self._watched.token.encode()):
            self._answer(403, b"open the address that was printed, with its token\n")
        elif address.path not in ("/", "/data"):
            self._answer(404, b"there is no such page\n")
        else:
            self._show(address.path, query.get("since", ""))

    def _show(self, path: str, since: str) -> None:
        try:
            shown = self._watched.now()
        except DataError as error:
            self._answer(503, f"{error}\n".encode())
            return
        if path == "/":
            self._answer(200, page_of(shown, self._watched.token).encode(), "text/html")
        elif since == shown["revision"]:
            self._answer(204, b"", "application/json")
        else:
            self._answer(200, encoded(shown), "application/json")

    def _answer(self, status: int, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for a request."""
