"""Weights sent into an engine: TRL's protocol and vLLM's own, spoken to a stand-in of each server."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megazero.errors import CheckpointError
from megazero.formats.hf.push import gloo, send_weights
from megazero.formats.hf.save import FolderAtEnd
from megazero.formats.hf.stream import hash_of
from tests.equivalence.test_hf_layouts import config_of
from tests.formats.hf.test_stream import on_ranks, parts_of
from tests.layouts.layout import VOCABULARY, Layout


class StandIn(ThreadingHTTPServer):
    """The routes of TRL's server for vLLM, with one rank that has no engine: it keeps what it is sent."""

    def __init__(self, port: int, fails: str = ""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.meeting = port
        self.fails = fails
        self.weights: dict[str, torch.Tensor] = {}
        self.told: list[tuple[str, dict]] = []
        self.group = self.receiving = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def join(self, body: dict) -> None:
        store = dist.TCPStore(body["host"], body["port"], body["world_size"], is_master=True)
        self.group = dist.ProcessGroupGloo(store, 0, body["world_size"], timedelta(seconds=60))

    def receive(self, body: dict) -> None:
        tensor = torch.empty(body["shape"], dtype=getattr(torch, body["dtype"].removeprefix("torch.")))
        options = dist.BroadcastOptions()
        options.rootRank = 1
        self.group.broadcast([tensor], options).wait()
        assert body["name"] not in self.weights, "sent twice"
        self.weights[body["name"]] = tensor
        assert hash_of(tensor) == body["sha256"]

    def wait(self) -> None:
        if self.receiving is not None:
            self.receiving.join(60)


class VllmStandIn(StandIn):
    """The routes of vLLM's own server: it answers when its rank, the second, has done what was asked."""

    def join(self, body: dict) -> None:
        info = body["init_info"]
        assert info["rank_offset"] == 1
        store = dist.TCPStore(info["master_address"], info["master_port"], info["world_size"])
        self.group = dist.ProcessGroupGloo(store, 1, info["world_size"], timedelta(seconds=60))

    def receive(self, body: dict) -> None:
        update = body["update_info"]
        assert update["packed"] is False
        for name, dtype, shape in zip(*(update[k] for k in ("names", "dtype_names", "shapes")), strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensor], dist.BroadcastOptions()).wait()
            assert name not in self.weights, "sent twice"
            self.weights[name] = tensor


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._answer({"world_size": 1})

    def do_POST(self) -> None:
        server, route = self.server, self.path.strip("/")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.wait()
        server.told.append((route, body))
        own = {"init_weight_transfer_engine": server.join, "update_weights": server.receive}
        if route == server.fails:
            self.send_error(500, "the engine is gone")
            return
        if route in own:
            own[route](body)
        work = {"init_communicator": server.join, "update_named_param": server.receive}.get(route)
        if work is not None:  # as TRL's server, which answers before its ranks have done it
            server.receiving = threading.Thread(target=work, args=(body,), daemon=True)
            server.receiving.start()
        self._answer({"message": "received"})

    def _answer(self, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def free_port() -> int:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as held:
        return held.server_port


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_an_engine_gets_the_stream_by_trls_protocol(untied, tmp_path):
    layout = Layout(tp=2, dp=2, zero=3)
    config = config_of(layout, "llama", untied, save_hf=str(tmp_path / "hf"))
    server = StandIn(free_port())
    url = f"http://127.0.0.1:{server.server_port}/"

    def work(resumed, context):
        folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
        sent = send_weights(
            folder.stream(parts_of(resumed.engine), context, 7), context, url, port=server.meeting
        )
        folder.write(parts_of(resumed.engine), context, 7)
        return sent

    sent, *others = on_ranks(layout, config, work)
    server.wait()
    server.shutdown()
    assert others == [{}] * 3
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    assert server.weights.keys() == expected.keys()
    assert ("lm_head.weight" in server.weights) == untied
    assert all(torch.equal(server.weights[name], expected[name]) for name in expected)
    assert sent == {name: hash_of(tensor) for name, tensor in server.weights.items()}
    routes = [route for route, _ in server.told]
    count = len(expected)
    ends = ["reset_prefix_cache", "close_communicator"]
    assert routes == ["init_communicator", *["update_named_param"] * count, *ends]
    assert server.told[0][1]["world_size"] == 2
    assert server.told[1][1]["version"] == 7


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_an_engine_gets_the_stream_by_vllms_own_protocol(untied, tmp_path):
    layout = Layout(tp=2, dp=2, zero=3)
    config = config_of(layout, "llama", untied, save_hf=str(tmp_path / "hf"))
    port = free_port()
    server = VllmStandIn(port)
    url = f"http://127.0.0.1:{server.server_port}"

    def work(resumed, context):
        folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
        parts = parts_of(resumed.engine)
        sent = send_weights(folder.stream(parts, context, 7), context, url, protocol="vllm", port=port)
        folder.write(parts, context, 7)
        return sent

    sent, *others = on_ranks(layout, config, work)
    server.shutdown()
    assert others == [{}] * 3
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    assert server.weights.keys() == expected.keys()
    assert ("lm_head.weight" in server.weights) == untied
    assert all(torch.equal(server.weights[name], expected[name]) for name in expected)
    assert sent == {name: hash_of(tensor) for name, tensor in server.weights.items()}
    begin = ["init_weight_transfer_engine", "pause?mode=keep&clear_cache=true", "start_weight_update"]
    updates = ["update_weights"] * len(expected)
    assert [route for route, _ in server.told] == [*begin, *updates, "finish_weight_update", "resume"]
    assert server.told[2][1] == {"is_checkpoint_format": True}


@pytest.mark.parametrize(
    ("route", "connect"),
    [
        ("init_weight_transfer_engine", lambda host, port, rank, size: lambda tensor: None),
        ("update_weights", gloo),
    ],
    ids=["begin", "update"],
)
def test_what_vllm_refuses_is_told_at_once_and_nothing_is_finished(route, connect, tmp_path):
    layout = Layout()
    config = config_of(layout, "llama", False, save_hf=str(tmp_path / "hf"))
    port = free_port()
    server = VllmStandIn(port, fails=route)
    url = f"http://127.0.0.1:{server.server_port}"

    def work(resumed, context):
        folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
        stream = folder.stream(parts_of(resumed.engine), context, 7)
        with pytest.raises(CheckpointError, match=rf"{route}` must answer, but does not: .*500"):
            send_weights(stream, context, url, protocol="vllm", port=port, connect=connect)
        return True

    assert on_ranks(layout, config, work) == [True]
    server.shutdown()
    assert server.told[-1][0] == route


def test_an_engine_that_refuses_is_told_of_on_every_rank(tmp_path):
    layout = Layout(tp=2)
    config = config_of(layout, "llama", False, save_hf=str(tmp_path / "hf"))
    server = StandIn(free_port(), fails="init_communicator")
    url = f"http://127.0.0.1:{server.server_port}"

    def work(resumed, context):
        folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
        parts = parts_of(resumed.engine)
        with pytest.raises(CheckpointError, match=r"init_communicator/` must answer, but does not: .*500"):
            send_weights(folder.stream(parts, context, 7), context, url, port=server.meeting)
        with pytest.raises(CheckpointError, match=r"rank 0 could not send weights to http://127.0.0.1:9"):
            send_weights(folder.stream(parts, context, 7), context, "http://127.0.0.1:9")
        return True

    assert on_ranks(layout, config, work) == [True, True]
    server.shutdown()
