"""`send_weights`: a stream of weights into a running engine, by the protocols of TRL's server and of vLLM's.

TRL's server for vLLM:

    GET  /get_world_size/                              the engine's ranks
    POST /init_communicator/  {host, port, world_size} the engine's ranks, and this one as the last, meet
    POST /update_named_param/ {name, dtype, shape}     then a broadcast from the last rank; for each tensor
    POST /reset_prefix_cache/                          keys and values of old weights are forgotten
    POST /close_communicator/

The bodies of the second and the third have the `version` too, and that of a tensor its `sha256`; servers that
do not know these fields ignore them.

vLLM's own server, with `VLLM_SERVER_DEV_MODE=1` and a `--weight-transfer-config`:

    GET  /get_world_size
    POST /init_weight_transfer_engine {init_info}      meanwhile the ranks meet, of which this is the first
    POST /pause, /start_weight_update                  requests wait, and old keys and values are forgotten
    POST /update_weights {update_info}                 meanwhile a broadcast from the first rank; each tensor
    POST /finish_weight_update, /resume
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Literal, Protocol, TypeVar, cast

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, TCPStore

from megazero.checkpoint.saver import together
from megazero.errors import CommunicationError
from megazero.formats.hf.stream import WeightStream
from megazero.mpu.context import ParallelContext
from megazero.mpu.threads import helper_thread

_Result = TypeVar("_Result")
Broadcast = Callable[[Tensor], None]
"""Sends a tensor on the CPU from this rank to the engine's ranks; returns when it is sent."""


class Connect(Protocol):
    """Makes a `Broadcast` among `size` ranks that meet at a port, of which this is `rank`.

    Rank 0 opens the port: the engine's first one by TRL's protocol, this one by vLLM's.
    """

    def __call__(self, host: str, port: int, rank: int, size: int) -> Broadcast:
        """Connect; returns when all ranks have met."""


def gloo(host: str, port: int, rank: int, size: int) -> Broadcast:
    """Connect over Gloo."""
    store = TCPStore(host, port, size, is_master=rank == 0, timeout=timedelta(seconds=60))
    group = cast(ProcessGroup, ProcessGroupGloo(store, rank, size, timedelta(seconds=600)))

    def broadcast(tensor: Tensor) -> None:
        group.broadcast(tensor, rank).wait()

    return broadcast


def send_weights(
    stream: WeightStream,
    context: ParallelContext,
    url: str,
    *,
    protocol: Literal["trl", "vllm"] = "trl",
    host: str = "127.0.0.1",
    port: int = 51216,
    connect: Connect = gloo,
    timeout: float = 60.0,
) -> dict[str, str]:
    """Send a stream into the engine at `url`; every rank calls this, and the first one speaks with it.

    Args:
        stream: the weights; a stream that has not begun, with a version.
        context: the ranks that gather them.
        url: the server, such as ``http://127.0.0.1:8000``.
        protocol: that of TRL's server for vLLM, or vLLM's own.
        host, port: where the first rank waits for the others. The host is sent as it is.
        connect: makes the broadcast; an engine on GPUs wants NCCL's.
        timeout: seconds that an answer may take.

    Returns:
        Name -> SHA-256 of the bytes that were sent; empty on other ranks.

    Raises:
        CheckpointError: on every rank: the server cannot be reached or refuses, or the weights cannot be
            gathered. What was sent stays in the engine, and its cache is not reset.
    """
    send = _send_to_trl if protocol == "trl" else _send_to_vllm

    def work() -> None:
        try:
            if stream.yields:
                send(stream, _Server(url.rstrip("/"), timeout), (host, port), connect)
        except (CommunicationError, RuntimeError) as error:
            raise OSError(str(error)) from error
        finally:
            stream.finish()

    together(context, work, f"send weights to {url}")
    return stream.hashes


def _send_to_trl(stream: WeightStream, server: _Server, place: tuple[str, int], connect: Connect) -> None:
    ranks, version = server.ranks("get_world_size/"), stream.version
    body = {"host": place[0], "port": place[1], "world_size": ranks + 1, "version": version}
    server.ask("init_communicator/", body)
    broadcast = connect(*place, ranks, ranks + 1)
    for name, tensor in stream:
        body = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        server.ask("update_named_param/", {**body, "version": version, "sha256": stream.hashes.get(name)})
        broadcast(tensor.contiguous())
    server.ask("reset_prefix_cache/", {})
    server.ask("close_communicator/", {})


def _send_to_vllm(stream: WeightStream, server: _Server, place: tuple[str, int], connect: Connect) -> None:
    size = server.ranks("get_world_size") + 1
    meeting = {"master_address": place[0], "master_port": place[1], "rank_offset": 1, "world_size": size}
    begin = partial(connect, *place, 0, size)
    broadcast = server.ask_during(begin, "init_weight_transfer_engine", {"init_info": meeting})
    server.ask("pause?mode=keep&clear_cache=true", {})
    server.ask("start_weight_update", {"is_checkpoint_format": True})
    for name, tensor in stream:
        dtype = str(tensor.dtype).removeprefix("torch.")
        update = {"names": [name], "dtype_names": [dtype], "shapes": [list(tensor.shape)], "packed": False}
        server.ask_during(partial(broadcast, tensor.contiguous()), "update_weights", {"update_info": update})
    server.ask("finish_weight_update", {})
    server.ask("resume", {})


class _Server:
    def __init__(self, url: str, timeout: float):
        self.url = url
        self.timeout = timeout

    def ranks(self, route: str) -> int:
        """The number of the engine's ranks."""
        ranks = self.ask(route).get("world_size")
        if type(ranks) is not int or ranks < 1:
            raise CommunicationError(
                f"`world_size` must be the engine's number of ranks, but is {ranks!r:.80}"
            )
        return ranks

    def ask_during(self, work: Callable[[], _Result], route: str, body: dict[str, object]) -> _Result:
        """Ask a route that is answered when `work` is done; a refusal does not wait for it."""
        done: Future[_Result] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        helper_thread(run, "weights").start()
        self.ask(route, body)
        return done.result(self.timeout)

    def ask(self, route: str, body: dict[str, object] | None = None) -> dict[str, object]:
        """Ask a route: POST with a body, else GET."""
        where = f"{self.url}/{route}"
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
