"""Every field of every endpoint: a wrong type or value is refused by the field's name."""

from __future__ import annotations

import json
import math
import random

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from megazero.serving.http import fields
from megazero.serving.http.fields import CHAT, COMPLETIONS, REFUSED, Field, Refusal, parse, read
from megazero.serving.http.megatron import _FIELDS as MEGATRON
from megazero.serving.http.mii import KEYWORDS
from tests.serving.fake import saying
from tests.serving.http.client import site
from tests.tables import over_table

WRONG: dict[str, list[object]] = {
    "integer": ["1", 1.5, True, [1], {"a": 1}, 10**30],
    "number": ["1", True, [1.0], {}, 10**400],
    "boolean": [0, 1, "true", [True], {}],
    "string": [1, True, ["a"], {}],
    "strings": [1, True, [1], ["a", None], {}],
    "object": ["{}", [1], 1, True],
    "list": ["a", 1, True, {}],
    "anything": [],
}
ENDPOINTS = {
    ("POST", "/v1/completions"): (COMPLETIONS, {"prompt": "a", "max_tokens": 1}),
    ("POST", "/v1/chat/completions"): (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    ),
    ("PUT", "/api"): (MEGATRON, {"prompts": ["a"], "tokens_to_generate": 1}),
    ("POST", "/mii/tiny"): (KEYWORDS, {"prompts": ["a"], "max_new_tokens": 1}),
}


@pytest.mark.parametrize(("place", "table"), ENDPOINTS.items(), ids=[path for _, path in ENDPOINTS])
def test_a_wrong_type_or_range_in_any_field_names_the_field(place, table):
    method, path = place
    rows, body = table
    with site(saying(97)) as server:

        async def work(client):
            for field in rows:
                values = list(WRONG[field.kind])
                if field.kind in ("integer", "number"):
                    values += [field.low - 1] if field.low > -math.inf else []
                    values += [field.high * 2 + 1] if field.high < math.inf else []
                for value in values:
                    answer = await client.request(method, path, json={**body, field.name: value})
                    assert answer.status_code == 400, (field.name, value)
                    assert answer.json()["error"]["param"] == field.name, (field.name, value)
                    assert f"`{field.name}` must be" in answer.json()["error"]["message"]

        server.run(work)
        assert server.engine.submitted == []


@over_table("name", REFUSED)
def test_what_is_not_there_is_refused_by_its_name(name):
    with site() as server:
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = server.ask(path, {"prompt": "a", "messages": [], name: {"x": [1]}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
            assert answer.json()["error"]["code"] == "unsupported"


def test_neutral_values_of_what_is_not_there_are_accepted():
    body = {"prompt": "a", "max_tokens": 1, "tools": [], "suffix": None, "response_format": {"type": "text"}}
    with site(saying(97)) as server:
        answer = server.ask("/v1/completions", {**body, "tool_choice": "none", "parallel_tool_calls": False})
    assert answer.status_code == 200
    assert "x-ignored-fields" not in answer.headers


@over_table(
    ("body", "param", "message"),
    [
        ({"prompt": 3}, "prompt", "a list of such lists, but is 3"),
        ({"prompt": [3, "a"]}, "prompt", "from 0 to 256, but one is"),
        ({"prompt": ["a", 3]}, "prompt", "or a list of such lists"),
        ({"prompt": [[1], "a", None]}, "prompt", "or a list of such lists"),
        ({"prompt": [True]}, "prompt", "one is true"),
        ({"prompt": [-1]}, "prompt", "one is -1"),
        ({"prompt": [1.0]}, "prompt", "one is 1.0"),
        ({"prompt": {}}, "prompt", "a list of such lists, but is {}"),
        ({"stop": ""}, "stop", "of 1 to 1024 characters"),
        ({"stop": ["a", ""]}, "stop", "of 1 to 1024 characters"),
        ({"stop": ["a"] * 65}, "stop", "at most 64 strings, but is 65"),
        ({"stop_token_ids": [257]}, "stop_token_ids", "from 0 to 256, but one is 257"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", 'one is "a"'),
        ({"logit_bias": {"a": 1}}, "logit_bias", 'maps "a" to 1'),
        ({"logit_bias": {"257": 1}}, "logit_bias", 'maps "257" to 1'),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"1": "2"}}, "logit_bias", 'to "2"'),
        ({"logit_bias": {"1": True}}, "logit_bias", "to true"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "must map ids"),
        ({"best_of": 3, "n": 2}, "best_of", "must be `n`"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "must come with `stream` true"),
        ({"temperature": 1e-320}, None, ""),
    ],
)
def test_values_that_do_not_fit(body, param, message):
    with site(saying(97)) as server:
        answer = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1, **body})
    if param is None:
        assert answer.status_code in (200, 400)
        return
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_null_is_the_default():
    values, ignored = read(
        {"a": None, "b": 2, "c": 3}, (Field("a", "integer", 0, 9, 7), Field("b", "number"))
    )
    assert (values, ignored) == ({"a": 7, "b": 2}, ("c",))


def test_messages_are_sentences():
    with pytest.raises(Refusal) as caught:
        Field("top_p", "number", 0.25, 1).check(7)
    assert caught.value.message == "`top_p` must be a number, from 0.25 to 1, but is 7"
    with pytest.raises(Refusal) as caught:
        parse(b'{"a":' * 33 + b"1" + b"}" * 33)
    assert "it is deeper than 32 levels" in caught.value.message
    assert fields.shown("x" * 100) == '"' + "x" * 56 + "..."


def spoiled(draw: random.Random, body: dict) -> tuple[str, str, bytes]:
    """A request with some of its fields, types, JSON or path spoiled."""
    (method, path), (rows, _) = draw.choice(list(ENDPOINTS.items()))
    odd = [
        None,
        True,
        -1,
        0,
        1,
        2**63,
        1e308,
        -0.0,
        "",
        "\u0000",
        "🙂",
        [],
        {},
        [[]],
        [{}],
        {"a": {}},
        ["a"],
        [1, "b"],
    ]
    given = dict(body)
    for _ in range(draw.randrange(5)):
        name = draw.choice([field.name for field in rows] + [*REFUSED, "odd"])
        given[name] = draw.choice(odd)
    for name in draw.sample(sorted(given), draw.randrange(2)):
        del given[name]
    content = json.dumps(given).encode()
    if draw.random() < 0.3:
        place = draw.randrange(len(content) + 1)
        content = content[:place] + draw.randbytes(draw.randrange(4)) + content[place + draw.randrange(4) :]
    if draw.random() < 0.05:
        path += draw.choice(["/", "x", "//", "?a=b", "%00"])
    return draw.choice([method] * 19 + ["DELETE"]), path, content


def fuzz(count: int, seed: int) -> dict[int, int]:
    """Send spoiled requests, some at once; return how many had each status."""
    draw, statuses = random.Random(seed), {}
    with site(saying(*"aé🙂 ".encode())) as server:

        async def work(client):
            for _ in range(count):
                body = draw.choice([body for _, body in ENDPOINTS.values()])
                method, path, content = spoiled(draw, body)
                answer = await client.request(method, path, content=content, timeout=20)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                if answer.status_code != 200:
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        server.run(work)
        assert server.service.open == 0
        assert server.engine.counters.running == 0
    return statuses


def test_300_malformed_requests_leave_no_traceback_and_nothing_stuck():
    statuses = fuzz(300, 1)
    assert sum(statuses.values()) == 300
    assert set(statuses) <= {200, 400, 404, 405}
    assert statuses[400] > 100
    assert statuses[200] > 10


@pytest.mark.slow
def test_10_000_malformed_requests():
    statuses = fuzz(10_000, 2)
    assert sum(statuses.values()) == 10_000
    assert set(statuses) <= {200, 400, 404, 405}
