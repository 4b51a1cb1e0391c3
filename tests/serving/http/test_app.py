"""What the application does around answers: who may ask, limits, errors, ends, health and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from megazero.serving.engine import EngineLimits
from tests.serving.fake import saying
from tests.serving.http.client import events, site
from tests.tables import over_table

PATH = "/v1/completions"
BODY = {"prompt": "p", "max_tokens": 3}


def test_a_key_is_asked_for_if_there_is_one():
    with site(api_key="secret") as server:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer secre"}, 401),
            ({"Authorization": "secret"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
        ):
            for path, body in ((PATH, BODY), ("/v1/models", None), ("/metrics", None)):
                assert server.ask(path, body, headers=headers).status_code == status
        answer = server.ask(PATH, BODY)
        assert server.ask("/health").status_code == server.ask("/").status_code == 200
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error"]["type"] == "authentication_error"


def test_another_models_name_is_not_found():
    with site() as server:
        answer = server.ask(PATH, {**BODY, "model": "gpt-9"})
        known = server.ask("/v1/models").json()
        one = server.ask("/v1/models/other").json()
        none = server.ask("/v1/models/a/b")
    assert answer.status_code == none.status_code == 404
    assert answer.json()["error"] == {
        "message": '`model` must be tiny or other, but is "gpt-9"',
        **{"type": "not_found_error", "param": "model", "code": "model_not_found"},
    }
    assert known["object"] == "list"
    assert [row["id"] for row in known["data"]] == ["tiny", "other"]
    assert (one["object"], one["owned_by"], one["max_model_len"]) == ("model", "megazero", 256)


@over_table(("method", "path", "status"), [("GET", "/nope", 404), ("GET", PATH, 405), ("POST", "/api", 405)])
def test_other_paths_and_methods(method, path, status):
    with site() as server:
        answer = server.ask(path, method=method)
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith(
        f"`{method} {path}` must be one of this server's paths"
    )


@over_table(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}",
    ],
)
def test_a_body_that_is_no_json(content):
    with site() as server:
        answer = server.ask(PATH, content)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


@over_table("content", [b"[]", b"3", b'"x"', b"null"])
def test_a_body_that_is_no_object(content):
    with site() as server:
        answer = server.ask(PATH, content)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body must be an object of JSON, but is ")


def test_a_body_that_is_too_long_is_not_read_to_its_end():
    taken = []

    async def endless():
        for _ in range(1000):
            taken.append(1)
            yield b" " * 1000

    with site(body_limit=5000) as server:
        answer = server.run(lambda client: client.post(PATH, content=endless()))
        said = server.ask(PATH, b" " * 6000)
    assert answer.status_code == said.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert len(taken) <= 7


def test_unknown_fields_are_ignored_and_named():
    with site() as server:
        answer = server.ask(PATH, {**BODY, "zeta": 1, "héta": 2})
        assert answer.status_code == 200
        assert answer.headers["x-ignored-fields"] == "h?ta, zeta"
        assert "x-ignored-fields" not in server.ask(PATH, BODY).headers


def test_a_full_queue_says_when_to_come_again():
    with site(limits=EngineLimits(max_waiting=2, max_running=2), paused=True) as server:

        async def work(client):
            waiting = [asyncio.create_task(client.post(PATH, json=BODY)) for _ in range(2)]
            while len(server.engine.submitted) < 2:
                await asyncio.sleep(0.001)
            refused = await client.post(PATH, json=BODY)
            many = await client.post(PATH, json={**BODY, "n": 5})
            server.engine.go.set()
            return refused, many, await asyncio.gather(*waiting)

        refused, many, done = server.run(work)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert (many.status_code, many.json()["error"]["param"]) == (400, "n")  # it could never be queued
    assert [answer.status_code for answer in done] == [200, 200]


def test_a_draining_server_refuses_and_says_so():
    with site() as server:
        server.service.draining = True
        answer = server.ask(PATH, BODY)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert server.ask("/health").json() == {"status": "draining"}


def test_health_fails_if_a_rank_is_silent():
    with site(patience=2.0) as server:
        assert server.ask("/health").status_code == 200
        server.engine.answered = time.monotonic() - 7.4
        answer = server.ask("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "all ranks must answer, but have not for 7 s"


def test_an_error_of_the_engine_is_an_error_and_in_a_stream_its_last_event():
    with site(saying(97)) as server:
        server.engine.fails_after = 2
        answer = server.ask(PATH, {**BODY, "max_tokens": 9})
        stream = server.ask(PATH, {**BODY, "max_tokens": 9, "stream": True})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the model must be finite, but is not"
    assert stream.status_code == 200
    *parts, last = [json.loads(block[6:]) for block in stream.text.strip().split("\n\n")]
    assert "".join(part["choices"][0]["text"] for part in parts) == "aa"
    assert last["error"]["type"] == "server_error"
    assert server.service.open == 0


def test_a_stream_has_comments_while_nothing_comes():
    with site(paused=True, ping=0.02) as server:

        async def work(client):
            task = asyncio.create_task(client.post(PATH, json={**BODY, "stream": True}))
            await asyncio.sleep(0.1)
            server.engine.go.set()
            return await task

        answer = server.run(work)
    assert answer.text.startswith(": waiting\n\n: waiting\n\n")
    assert events(answer)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_cancelled(stream):
    """The transport of httpx tells nobody that it has gone, so this speaks ASGI."""
    with site(saying(97), paused=True) as server:
        sent = []

        async def main() -> None:
            gone = asyncio.Event()
            body = json.dumps({**BODY, "max_tokens": 200, "stream": stream}).encode()
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                if messages:
                    return messages.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                sent.append(message)

            scope = {
                **{"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "headers": []},
                **{
                    "query_string": b"",
                    "http_version": "1.1",
                    "scheme": "http",
                    "asgi": {"spec_version": "2.3"},
                },
                **{"server": ("x", 80), "client": ("y", 1)},
            }
            task = asyncio.create_task(server.app(scope, receive, send))
            while not server.engine.submitted:
                await asyncio.sleep(0.001)
            gone.set()
            await asyncio.wait_for(task, 5)

        asyncio.run(main())
        assert server.engine.cancelled == [0]
        assert server.service.open == 0
        assert server.service.metrics.ended["abort"] == 1
        assert sent[0]["status"] == (200 if stream else 499)


def test_one_line_is_logged_for_a_request_and_no_text(caplog):
    caplog.set_level(logging.INFO, "megazero.serve")
    with site(saying(97)) as server:
        server.ask(PATH, {"prompt": "private words", "max_tokens": 3})
        server.ask(PATH, {"prompt": "private words", "max_tokens": 3, "stream": True})
        server.ask("/no%0A/such")
    lines = [record.getMessage() for record in caplog.records if record.name == "megazero.serve"]
    assert len(lines) == 3
    for line in lines[:2]:
        assert re.fullmatch(r"\S+ POST /v1/completions 200 \d+ ms, 13 tokens in, 3 out", line)
    assert "private" not in caplog.text
    assert "\n" not in lines[2]


def test_metrics_have_the_names_that_dashboards_know():
    with site(saying(97)) as server:
        server.ask(PATH, {**BODY, "max_tokens": 4})
        server.ask(PATH, {**BODY, "max_tokens": 4, "stop": "aa"})
        text = server.ask("/metrics").text
    values = dict(re.findall(r'^(vllm:\w+)\{model_name="tiny"\} (\S+)$', text, re.M))
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == "0"
    assert float(values["vllm:kv_cache_usage_perc"]) == 0.0
    assert values["vllm:prompt_tokens_total"] == "2"
    assert int(values["vllm:generation_tokens_total"]) >= 6
    assert values["vllm:num_preemptions_total"] == "0"
    for reason, count in (("stop", 1), ("length", 1), ("abort", 0)):
        assert f'vllm:request_success_total{{model_name="tiny",finished_reason="{reason}"}} {count}\n' in text
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert f"# TYPE vllm:{name}_seconds histogram" in text
        assert f'vllm:{name}_seconds_bucket{{model_name="tiny",le="+Inf"}} 2' in text
        assert values[f"vllm:{name}_seconds_count"] == "2"
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) vllm:\w+ .+|vllm:\w+\{[^}]*\} [\d.e+-]+", line), line


def test_the_page_asks_nobody_else():
    with site() as server:
        page = server.ask("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"https?://|@import|src=|url\(", page.text)


def test_the_server_may_be_ended_only_where_miis_door_started_it():
    with site() as server:
        assert server.ask("/terminate", b"", method="POST").status_code == 404
    with site(terminate=True) as server:
        assert server.ask("/terminate", b"", method="POST").status_code == 200
        assert server.ended == [True]
