"""Weights as a stream: from any layout the converted checkpoint, with hashes, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import threading
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.part import Part
from megazero.config.steps import Progress
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.convert import convert_to_hf
from megazero.formats.hf.push import gloo, send_weights
from megazero.formats.hf.save import FolderAtEnd
from megazero.formats.hf.stream import GatheredSource, hash_of
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.keepers import keepers_of
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.resume.weights import take_foreign_weights
from megazero.train.step.state import TrainState
from megazero.verify.record import verification_engine
from tests.equivalence.test_hf_expert_layouts import config_of as expert_config
from tests.equivalence.test_hf_layouts import config_of
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout

DENSE = (
    Layout(),
    Layout(tp=2),
    Layout(tp=4, sequence_parallel=True),
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=2),
    Layout(dp=3, zero=3),
    Layout(cp=2, zero=1),
    Layout(tp=2, cp=2),
    Layout(pp=2, dp=2, zero=2),
    Layout(pp=2, schedule="interleaved", virtual=2, layers=4),
    Layout(pp=2, schedule="zb-v", layers=4),
    Layout(pp=2, schedule="zb-h1", layers=4),
    Layout(tp=2, pp=2, schedule="1f1b"),
    Layout(tp=2, dp=2, zero=3),
)
EXPERTS = (
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=2, zero=3),
    Layout(tp=2, dp=2, ep=4, etp=1),
    Layout(pp=2, dp=2, ep=2, zero=1),
)


def on_ranks(layout: Layout, config, work) -> list:
    """`work(engine, context, resumed)` on the ranks of a layout, as threads."""
    world = ThreadWorld(layout.world_size)

    def rank_work(rank):
        context = thread_context(world, layout.grid, rank)
        engine_of = partial(verification_engine, context=context)
        begin = partial(take_foreign_weights, config, context, VOCABULARY)
        resumed = resume(config, context, VOCABULARY, engine_of, begin)
        return work(resumed, context)

    return world.run(rank_work)


def parts_of(engine) -> list:
    return [part for keeper in keepers_of(engine, ()) for part in keeper.parts()]


def streamed(config, resumed, context) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What this rank gets of the stream, and its hashes."""
    folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
    assert folder is not None
    stream = folder.stream(parts_of(resumed.engine), context, 7)
    return dict(stream), stream.hashes


def check(layout: Layout, config, folder: Path) -> None:
    def work(resumed, context):
        saved = Snapshots(config, resumed.training_plan, resumed.engine, context, VOCABULARY, 1234)
        saved.save(TrainState(Progress(1, 8, 8 * SEQUENCE)))
        saved.saver.close()
        return streamed(config, resumed, context)

    (tensors, hashes), *others = on_ranks(layout, config, work)
    assert others == [({}, {})] * (layout.world_size - 1), layout.name
    convert_to_hf(config.checkpoint.save, folder / "converted")
    expected = load_file(folder / "converted" / "model.safetensors")
    assert sorted(tensors) == sorted(expected), layout.name
    assert all(torch.equal(tensors[name], expected[name]) for name in expected), layout.name
    assert hashes == {name: hash_of(tensor) for name, tensor in expected.items()}, layout.name


@pytest.mark.parametrize("layouts", [DENSE[2::4], pytest.param(DENSE, marks=pytest.mark.slow)], ids=len)
def test_on_every_layout_it_is_the_converted_checkpoint(layouts, tmp_path):
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        family, untied = ("gpt2", False) if number % 2 else ("llama", True)
        places = {"save": str(folder / "run"), "save_hf": str(folder / "hf")}
        check(layout, config_of(layout, family, untied, **places), folder)


@pytest.mark.parametrize("layouts", [EXPERTS[2:3], pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=len)
def test_with_experts_on_every_layout_it_is_the_converted_checkpoint(layouts, tmp_path):
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        kind = ("mixtral", "qwen2-moe")[number % 2]
        check(
            layout, expert_config(layout, kind, save=str(folder / "run"), save_hf=str(folder / "hf")), folder
        )


class DiesAt(Disk):
    """A disk on which the n-th change ends the process, as a kill does: nothing is cleaned up."""

    def __init__(self, left: int):
        self.left = left

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def make_folder(self, path):
        self._change()
        super().make_folder(path)

    def create(self, path):
        self._change()
        return super().create(path)

    def rename(self, old, new):
        self._change()
        super().rename(old, new)

    def remove(self, path):
        if self.left < 0:
            raise Killed
        super().remove(path)


class Killed(BaseException):
    """The end of a process."""


def test_a_kill_at_any_change_leaves_no_folder_or_the_whole_one(tmp_path):
    layout, out = Layout(), tmp_path / "hf"
    config = config_of(layout, "llama", False, save_hf=str(out))

    def work(resumed, context):
        for changes in range(50):
            folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
            try:
                folder.write(parts_of(resumed.engine), context, 7, DiesAt(changes))
            except Killed:
                assert not out.exists(), changes
                continue
            return changes
        return 0

    assert on_ranks(layout, config, work)[0] >= 4
    assert os.listdir(tmp_path) == ["hf"]  # what the killed ones left is gone
    versions = json.loads((out / "megazero_weights.json").read_text())
    tensors = load_file(out / "model.safetensors")
    assert versions == {"version": 7, "sha256": {name: hash_of(t) for name, t in tensors.items()}}


def test_a_full_disk_is_told_on_every_rank(tmp_path):
    layout = Layout(tp=2)
    config = config_of(layout, "gpt2", False, save_hf=str(tmp_path / "hf"))

    class Full(Disk):
        def create(self, path):
            raise OSError(28, "No space left on device", str(path))

    def work(resumed, context):
        folder = FolderAtEnd.of(config, VOCABULARY, {}, context)
        with pytest.raises(CheckpointError, match=r"rank 0 could not write .*No space left"):
            folder.write(parts_of(resumed.engine), context, 7, Full())
        return True

    assert on_ranks(layout, config, work) == [True, True]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    layout, out = Layout(), tmp_path / "hf"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    config = config_of(layout, "gpt2", False, save_hf=str(out))
    with pytest.raises(CheckpointError, match="must be new or an empty folder"):
        on_ranks(layout, config, lambda resumed, context: FolderAtEnd.of(config, VOCABULARY, {}, context))
    shutil.rmtree(out)
    alien = config.model.model_copy(update={"normalization": "RMSNorm"})
    config = config.model_copy(update={"model": alien})
    with pytest.raises(CheckpointError, match="transformers"):
        on_ranks(layout, config, lambda resumed, context: FolderAtEnd.of(config, VOCABULARY, {}, context))


def test_reading_asks_each_rank_for_its_own_boxes_alone():
    """A rank's memory holds what was asked for, however large the model is: no read fetches more."""
    layout = Layout(dp=2, zero=3)
    config = config_of(layout, "llama", True)

    def work(resumed, context):
        sizes = []
        exchange = context.world.exchange
        context.world.exchange = lambda transfers: (
            sizes.append(sum(t.tensor.numel() for t in transfers)) or exchange(transfers)
        )
        source = GatheredSource(parts_of(resumed.engine), context)
        folder = FolderAtEnd.of(
            config.model_copy(update={"checkpoint": CheckpointConfig(save_hf="nowhere")}),
            VOCABULARY,
            {},
            context,
        )
        tensors = dict(folder.stream(parts_of(resumed.engine), context, 0))
        return source.shapes, max(sizes), tensors

    (shapes, most, tensors), (same, _, nothing) = on_ranks(layout, config, work)
    assert shapes == same
    assert not nothing
    assert most <= max(tensor.numel() for tensor in tensors.values())


def test_no_rank_goes_ahead_of_the_first():
    """On a GPU, sends that wait longer than a call may take end the job: those of the last stage."""
    layout = Layout(pp=2)
    config = config_of(layout, "llama", True)
    begun = [0, 0]
    ahead = []

    def work(resumed, context):
        source = GatheredSource(parts_of(resumed.engine), context)
        exchange = context.world.exchange

        def counted(transfers):
            ahead.append(begun[1] - begun[0])
            return exchange(transfers)

        context.world.exchange = counted
        for key, shape in source.shapes.items():
            begun[context.rank] += 1
            source.read([Part.whole(key, torch.empty(shape))])

    on_ranks(layout, config, work)
    assert min(begun) > 8
    assert {abs(number) for number in ahead} <= {0, 1}


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
