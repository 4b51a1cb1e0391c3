"""The watch: news of a run that goes on, for the page that knows the token, and for nobody else."""

from __future__ import annotations

import http.client
import json
import threading

import pytest

from megazero.errors import ConfigError
from megazero.report.run import Source
from megazero.report.watch import Watched, open_server
from tests.report.samples import data_of, record, write


@pytest.fixture
def served(tmp_path):
    folder = write(tmp_path / "run", [record(1)])
    watched = Watched([Source.of(folder)])
    server = open_server(watched, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield folder, watched, server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    content = answer.status, answer.read()
    connection.close()
    return content


def test_news_come_as_the_file_grows(served):
    folder, watched, server = served
    status, page = ask(server, f"/?token={watched.token}")
    assert status == 200
    shown = data_of(page.decode())
    assert shown["watch"] == watched.token
    since = f"/data?token={watched.token}&since={shown['revision']}"
    assert ask(server, since) == (204, b"")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(2)) + "\n")
    status, data = ask(server, since)
    assert status == 200
    assert json.loads(data)["runs"][0]["steps"]["x"]["steps"] == [1, 2]
    (folder / "metrics.jsonl").unlink()
    assert ask(server, since)[0] == 503


def test_others_get_nothing(served):
    _, watched, server = served
    for path in ("/", "/data", "/?token=", "/?token=wrong", "/data?token=%00"):
        assert ask(server, path)[0] == 403, path
    assert ask(server, f"/?token={watched.token}", host="evil.example")[0] == 403
    assert ask(server, f"/metrics.jsonl?token={watched.token}")[0] == 404
    assert ask(server, f"/?token={watched.token}", host=f"localhost:{server.server_port}")[0] == 200


def test_it_is_there_for_this_machine_alone(served):
    assert served[2].server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_named(served):
    _, watched, server = served
    with pytest.raises(ConfigError, match=r"`--port` must be free, but \d+ is not .*; choose another"):
        open_server(watched, server.server_port)
