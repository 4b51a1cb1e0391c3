"""`send_weights`: a stream of weights into a running engine, by the protocol of TRL's server for vLLM.

    GET  /get_world_size/                              the engine's ranks
    POST /init_communicator/  {host, port, world_size} the engine's ranks, and this one as the last, meet
    POST /update_named_param/ {name, dtype, shape}     then a broadcast from the last rank; for each tensor
    POST /reset_prefix_cache/                          keys and values of old weights are forgotten
    POST /close_communicator/

The bodies of the second and the third have the `version` too, and that of a tensor its `sha256`; servers that
do not know these fields ignore them.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, TCPStore

from megazero.checkpoint.saver import together
from megazero.errors import CommunicationError
from megazero.formats.hf.stream import WeightStream, hash_of
from megazero.mpu.context import ParallelContext

Broadcast = Callable[[Tensor], None]
"""Sends a tensor on the CPU from this rank to the engine's ranks; returns when it is sent."""


class Connect(Protocol):
    """Makes a `Broadcast` among `size` ranks that meet at a port, of which this is `rank`."""

    def __call__(self, host: str, port: int, rank: int, size: int) -> Broadcast:
        """Connect; returns when all ranks have met."""


def gloo(host: str, port: int, rank: int, size: int) -> Broadcast:
    """Connect over Gloo. The engine's first rank opens the port."""
    store = TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=60))
    group = cast(ProcessGroup, ProcessGroupGloo(store, rank, size, timedelta(seconds=600)))

    def broadcast(tensor: Tensor) -> None:
        group.broadcast(tensor, rank).wait()

    return broadcast


def send_weights(
    stream: WeightStream,
    context: ParallelContext,
    url: str,
    *,
    host: str = "127.0.0.1",
    port: int = 51216,
    connect: Connect = gloo,
    timeout: float = 60.0,
) -> dict[str, str]:
    """Send a stream into the engine at `url`; every rank calls this, and the first one speaks with it.

    Args:
        stream: the weights; a stream that has not begun.
        context: the ranks that gather them.
        url: the server, such as ``http://127.0.0.1:8000``.
        host, port: where the engine's first rank waits for the others. The host is sent as it is.
        connect: makes the broadcast; an engine on GPUs wants NCCL's.
        timeout: seconds that an answer may take.

    Returns:
        Name -> SHA-256 of the bytes that were sent; empty on other ranks.

    Raises:
        CheckpointError: on every rank: the server cannot be reached or refuses, or the weights cannot be
            gathered. What was sent stays in the engine, and its cache is not reset.
    """
    sent: dict[str, str] = {}

    def work() -> None:
        try:
            if stream.yields:
                _send(stream, _Server(url.rstrip("/"), timeout), (host, port), connect, sent)
        except (CommunicationError, RuntimeError) as error:
            raise OSError(str(error)) from error
        finally:
            stream.finish()

    together(context, work, f"send weights to {url}")
    return sent


def _send(
    stream: WeightStream, server: _Server, place: tuple[str, int], connect: Connect, sent: dict[str, str]
) -> None:
    ranks = server.ask("get_world_size").get("world_size")
    if type(ranks) is not int or ranks < 1:
        raise CommunicationError(f"`world_size` must be the engine's number of ranks, but is {ranks!r:.80}")
    size, version = ranks + 1, stream.version
    host, port = place
    server.ask("init_communicator", {"host": host, "port": port, "world_size": size, "version": version})
    broadcast = connect(host, port, ranks, size)
    for name, tensor in stream:
        digest = hash_of(tensor)
        body = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        server.ask("update_named_param", {**body, "version": version, "sha256": digest})
        broadcast(tensor.contiguous())
        sent[name] = digest
    server.ask("reset_prefix_cache", {})
    server.ask("close_communicator", {})


class _Server:
    def __init__(self, url: str, timeout: float):
        self.url = url
        self.timeout = timeout

    def ask(self, route: str, body: dict[str, object] | None = None) -> dict[str, object]:
        """Ask a route: POST with a body, else GET."""
        where = f"{self.url}/{route}/"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(where, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                content = json.loads(answer.read() or b"{}")
        except (OSError, ValueError) as error:
            raise CommunicationError(f"`{where}` must answer, but does not: {error}") from error
        if not isinstance(content, dict):
            raise CommunicationError(f"`{where}` must answer with a JSON object, but does not")
        return content
