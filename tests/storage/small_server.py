"""A small server of S3's protocol in memory, for tests that cannot wait for a real one.

It runs on a thread of the test's process: `with SmallServer() as server`. Reads, ranges, conditional writes,
lists by pages, multipart uploads and deletes behave as S3's do. Signatures are not checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

KEY, SECRET = "testkey", "testsecret"
REGION = "us-east-1"


def environment(endpoint: str, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """The variables by which clients find a server of S3's protocol at `endpoint`."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": REGION,
        "no_proxy": "127.0.0.1",
    }


@dataclass(frozen=True)
class Stored:
    """An object's content and its tag."""

    content: bytes
    tag: str


@dataclass
class Answer:
    """What a request is answered."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None  # of a HEAD, which has no body

    @classmethod
    def error(cls, status: int, code: str) -> Answer:
        return cls(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())


class SmallServer:
    """The server, its objects and what was asked of it.

    objects: by "bucket/key"; a test may read and change them. requests: how many there were of each kind:
    GET, HEAD, PUT, DELETE, LIST, PARTS. sent, received: bytes of content. uploads: multipart uploads that
    were begun and neither completed nor aborted. ignores_conditions: a bad server, where the last write wins.
    refused_keys: access keys whose requests are denied. before, after: called with "PUT bucket/key" before a
    request is done and after it; what they return, if anything, is the answer instead (a lost answer).
    """

    def __init__(self, *buckets: str, page: int = 1000):
        self.buckets = set(buckets or ("bucket",))
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: Counter[str] = Counter()
        self.sent = self.received = 0
        self.page = page
        self.ignores_conditions = False
        self.refused_keys: set[str] = set()
        self.before: Callable[[str], Answer | None] = lambda request: None
        self.after: Callable[[str], Answer | None] = lambda request: None
        self.lock = threading.Lock()
        self._made = 0

    def __enter__(self) -> SmallServer:
        handler = type("Handler", (_Handler,), {"small": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._connections: list[_Handler] = []
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            connection.close_connection = True
            connection.shut()
        self._thread.join()
        deadline = time.monotonic() + 5
        while any(connection.alive for connection in self._connections) and time.monotonic() < deadline:
            time.sleep(0.002)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.endpoint)

    def put(self, path: str, content: bytes) -> str:
        """Put an object as "bucket/key"; returns its tag."""
        self.objects[path] = Stored(content, f'"{hashlib.md5(content).hexdigest()}"')
        return self.objects[path].tag

    def content(self, path: str) -> bytes:
        return self.objects[path].content

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        """Do one request."""
        parts = urlsplit(target)
        path, query = unquote(parts.path).strip("/"), parse_qs(parts.query, keep_blank_values=True)
        bucket, _, key = path.partition("/")
        kind = "LIST" if method == "GET" and not key else method
        kind = "PARTS" if "uploads" in query or "uploadId" in query else kind
        with self.lock:
            self.requests[kind] += 1
            self.received += len(body)
        given = re.search(r"Credential=([^/]*)/", headers.get("authorization", ""))
        if given and given[1] in self.refused_keys:
            return Answer.error(403, "InvalidAccessKeyId")
        if bucket not in self.buckets:
            return Answer.error(404, "NoSuchBucket")
        if early := self.before(f"{kind} {path}"):
            return early
        with self.lock:
            done = self._do(kind, method, path, query, {k.lower(): v for k, v in headers.items()}, body)
        return self.after(f"{kind} {path}") or done

    def _do(
        self,
        kind: str,
        method: str,
        path: str,
        query: dict[str, list[str]],
        head: dict[str, str],
        body: bytes,
    ) -> Answer:
        if kind == "PARTS":
            return self._multipart(method, path, query, head, body)
        if kind == "LIST":
            return self._list(path, query)
        if kind == "POST" and "delete" in query:
            keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
            for key in keys:
                self.objects.pop(f"{path}/{key}", None)
            gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return _xml("DeleteResult", gone)
        if kind == "DELETE":
            self.objects.pop(path, None)
            return Answer(204)
        if kind == "PUT":
            return self._put(path, body, head)
        return self._get(path, head, whole=method == "HEAD")

    def _get(self, path: str, head: dict[str, str], whole: bool) -> Answer:
        there = self.objects.get(path)
        if there is None:
            return Answer.error(404, "NoSuchKey")
        if "if-match" in head and head["if-match"] != there.tag:
            return Answer.error(412, "PreconditionFailed")
        size = len(there.content)
        answer = Answer(200, there.content, {"ETag": there.tag, "Accept-Ranges": "bytes"})
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", head.get("range", ""))
        if span and not whole:
            first = int(span[1]) if span[1] else max(size - int(span[2]), 0)
            last = min(int(span[2]) if span[1] and span[2] else size - 1, size - 1)
            if first >= size:
                return Answer.error(416, "InvalidRange")
            answer.status, answer.body = 206, there.content[first : last + 1]
            answer.headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        answer.headers["Last-Modified"] = formatdate(usegmt=True)
        answer.length = size if whole else None
        return answer

    def _put(self, path: str, body: bytes, head: dict[str, str]) -> Answer:
        there = self.objects.get(path)
        if not self.ignores_conditions:
            if head.get("if-none-match") == "*" and there is not None:
                return Answer.error(412, "PreconditionFailed")
            if "if-match" in head and there is None:
                return Answer.error(404, "NoSuchKey")
            if "if-match" in head and there is not None and head["if-match"] != there.tag:
                return Answer.error(412, "PreconditionFailed")
        return Answer(headers={"ETag": self.put(path, body)})

    def _multipart(
        self, method: str, path: str, query: dict[str, list[str]], head: dict[str, str], body: bytes
    ) -> Answer:
        if "uploads" in query:
            self._made += 1
            self.uploads[upload := f"upload-{self._made}"] = {}
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        upload = query["uploadId"][0]
        if upload not in self.uploads:
            return Answer.error(404, "NoSuchUpload")
        if method == "DELETE":
            del self.uploads[upload]
            return Answer(204)
        if method == "PUT":
            self.uploads[upload][int(query["partNumber"][0])] = body
            return Answer(headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        parts = self.uploads[upload]
        chosen = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())]
        if any(len(parts[number]) < 5 << 20 for number in chosen[:-1]):
            return Answer.error(400, "EntityTooSmall")
        answer = self._put(path, b"".join(parts[number] for number in chosen), head)
        if answer.status == 200:
            del self.uploads[upload]
            answer = _xml("CompleteMultipartUploadResult", f"<ETag>{escape(answer.headers['ETag'])}</ETag>")
        return answer

    def _list(self, bucket: str, query: dict[str, list[str]]) -> Answer:
        prefix, after = (query.get(name, [""])[0] for name in ("prefix", "continuation-token"))
        after = max(after, query.get("start-after", [""])[0])
        start = f"{bucket}/{prefix}"
        keys = sorted(path.partition("/")[2] for path in self.objects if path.startswith(start))
        inner = {key for key in keys if query.get("delimiter") and "/" in key.removeprefix(prefix)}
        left = [key for key in keys if key > after and key not in inner]
        page = left[: self.page]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(self.objects[f'{bucket}/{key}'].tag)}</ETag>"
            f"<Size>{len(self.objects[f'{bucket}/{key}'].content)}</Size></Contents>"
            for key in page
        )
        more = len(left) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        heads = (
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{self.page}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
        )
        return _xml("ListBucketResult", heads + rows + token)


def _xml(name: str, inner: str) -> Answer:
    return Answer(body=f"<{name}>{inner}</{name}>".encode())


class _Handler(BaseHTTPRequestHandler):
    """Reads requests of one connection and writes the answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    small: SmallServer
    alive = True

    def setup(self) -> None:
        super().setup()
        self.small._connections.append(self)

    def finish(self) -> None:
        self.alive = False

    def shut(self) -> None:
        """End the connection, on which the thread may be waiting for a request."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        heads = {name.lower(): value for name, value in self.headers.items()}
        answer = self.small.answer(self.command, self.path, heads, body)
        length = len(answer.body) if answer.length is None else answer.length
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(length), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with self.small.lock:  # before the client has it, and asks for the number
                self.small.sent += len(answer.body)
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve
