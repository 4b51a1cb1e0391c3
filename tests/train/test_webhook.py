"""Notices to a webhook, against a server on this machine."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megazero.config.document import to_yaml
from megazero.config.resolve import parse_config
from megazero.errors import ConfigError, NumericsError
from megazero.mpu.launch import Launch
from megazero.train.observe.incidents import FailureLog, Incident, IncidentLog
from megazero.train.observe.monitors.base import CompositeMonitor
from megazero.train.observe.news import webhook
from megazero.train.observe.news.webhook import Webhook
from megazero.train.pretraining import pretrain
from tests.tables import over_table

SPIKE = Incident("spike", 42, "loss 9, where 2 is usual", "rolled back", (1,), {"norms": [1.5]})
SECRET = "/services/T01/B02/s3cr3t"
TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--train-iters 3 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size 15 --eval-iters 0"
)


class Server(ThreadingHTTPServer):
    """A chat's server: it keeps what is posted, and answers with the next status, or hangs."""

    daemon_threads = True

    def __init__(self, *statuses: int):
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses, self.posted, self.open = list(statuses), [], threading.Event()
        self.open.set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{SECRET}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.open.wait(10)
        server.posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.send_response(server.statuses.pop(0) if server.statuses else 204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr(webhook, "_PAUSES", (0.0, 0.0, 0.0))
    with Server() as running:
        yield running
        running.open.set()
        running.shutdown()


def sent(*hooks: Webhook) -> None:
    """Wait until everything is sent, as a process does when it ends."""
    for hook in hooks:
        hook._thread.shutdown()


def test_a_notice_has_all_facts_and_a_text_for_chats(server, tmp_path):
    hook = Webhook(server.url, tmp_path)
    IncidentLog(CompositeMonitor(), None, lambda incident: hook.tell("incident", incident)).add(SPIKE)
    sent(hook)
    ((path, kind, notice),) = server.posted
    assert (path, kind) == (SECRET, "application/json")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", notice.pop("time"))
    text = f"megazero on {socket.gethostname()}, {tmp_path}: spike at iteration 42: loss 9, where 2 is usual"
    assert notice == {
        "event": "incident",
        "run": str(tmp_path),
        "iteration": 42,
        "kind": "spike",
        "summary": "loss 9, where 2 is usual",
        "action": "rolled back",
        "ranks": [1],
        "host": socket.gethostname(),
        "text": text,
        "content": text,
    }


def test_the_failure_of_a_job_is_told_by_the_rank_with_the_diagnosis(server, tmp_path):
    from megazero.mpu.watch.failure import JobFailure

    hook = Webhook(server.url, tmp_path)
    failures = FailureLog(None, lambda incident: hook.tell("failure", incident))
    failures.reached = 7
    failures.note(JobFailure("rank 3 hangs", "all of it", (3,)))
    sent(hook)
    notice = server.posted[0][2]
    assert [notice[name] for name in ("event", "kind", "iteration", "ranks")] == [
        "failure",
        "job failed",
        7,
        [3],
    ]


def test_a_server_that_stumbles_is_asked_again(server, capsys):
    server.statuses = [500, 429, 200]
    hook = Webhook(server.url, None)
    hook.tell("incident", SPIKE)
    sent(hook)
    assert len(server.posted) == 3
    assert capsys.readouterr().err == ""


def test_a_url_that_does_not_answer_is_said_once_and_without_its_secret(server, capsys):
    server.statuses = [404] * 5
    hook = Webhook(server.url, None)
    for _ in range(3):
        hook.tell("incident", SPIKE)
    sent(hook)
    assert len(server.posted) == 5, "three tries, and then one for each notice"
    assert capsys.readouterr().err == (
        "warning: no notice reaches https://127.0.0.1/***, which `--notify` names: it answers with HTTP "
        "status 404\n"
    )


def test_nobody_at_the_address_is_said_too(server, capsys):
    url = server.url
    server.server_close()
    hook = Webhook(url, None)
    hook.tell("incident", SPIKE)
    sent(hook)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "refused" in said
    assert "s3cr3t" not in said


def test_no_step_waits_for_a_server_that_hangs_and_few_notices_wait(server):
    server.open.clear()
    hook, start = Webhook(server.url, None), time.monotonic()
    for number in range(100):
        hook.tell("incident", Incident("spike", number, "", "none"))
    assert time.monotonic() - start < 1.0
    server.open.set()
    sent(hook)
    assert [notice["iteration"] for _, _, notice in server.posted] == list(range(20))


def test_without_a_url_nothing_is_done():
    hook = Webhook(None, None)
    hook.tell("end", SPIKE)
    assert hook._thread._threads == set()


def test_a_notice_at_the_end_of_the_interpreter_is_sent_at_once(server):
    hook = Webhook(server.url, None)
    hook._thread.shutdown()
    hook.tell("failure", SPIKE)
    assert len(server.posted) == 1


def test_a_run_tells_how_it_ends(server, tmp_path, monkeypatch):
    """At its end, early, and by a fault; nothing that it prints or saves has the secret."""
    hooks = []
    init = Webhook.__init__
    monkeypatch.setattr(Webhook, "__init__", lambda hook, *args: (hooks.append(hook), init(hook, *args))[0])
    flags = [*TINY.split(), "--notify", server.url, "--save", str(tmp_path)]
    pretrain(parse_config(flags, world_size=1).config, Launch())
    pretrain(parse_config([*flags, "--exit-interval", "2"], world_size=1).config, Launch())
    monkeypatch.setattr("megazero.train.guards.spike_guard.SpikeGuard.judge", broken)
    with pytest.raises(NumericsError):
        pretrain(parse_config([*flags, "--finetune"], world_size=1).config, Launch())
    sent(*hooks)
    notices = [notice for _, _, notice in server.posted]
    assert [(n["event"], n["iteration"], n["summary"]) for n in notices] == [
        ("end", 3, "it is complete"),
        ("end", 2, "early: --exit-interval 2"),
        ("failure", 1, "NumericsError: a number is not finite"),
    ]
    for path in filter(lambda path: path.is_file(), tmp_path.rglob("*")):
        assert b"s3cr3t" not in path.read_bytes(), path


def broken(*args: object) -> None:
    raise NumericsError("a number is not finite")


def test_the_url_is_shown_and_saved_without_its_path_and_read_back_as_none(tmp_path):
    config = parse_config(
        [*TINY.split(), "--notify", f"https://hooks.example.org{SECRET}"], world_size=1
    ).config
    assert config.logging.notify == f"https://hooks.example.org{SECRET}"
    assert config.model_dump(mode="json")["logging"]["notify"] == "https://hooks.example.org/***"
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert "s3cr3t" not in (tmp_path / "c.yaml").read_text()
    again = parse_config(["--config", str(tmp_path / "c.yaml")], world_size=1).config
    assert again.logging.notify is None
    assert type(config).model_validate(config.model_dump(mode="json")).logging.notify is None


@over_table(
    "url",
    ["hooks.example.org/s3cr3t", "ftp://a/s3cr3t", "http:///s3cr3t", "http://[/s3cr3t", "https://a/b s3cr3t"],
)
def test_what_is_no_address_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError) as refused:
        parse_config([*TINY.split(), "--notify", url], world_size=1)
    assert refused.value.violations == [
        "`--notify` must be an address that begins with http:// or https://, but is another text."
    ]
