"""Megatron's `PUT /api` and MII's REST."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from tests.serving.fake import saying
from tests.serving.http.client import site
from tests.tables import over_table


def put(server, body):
    return server.ask("/api", body, method="PUT")


def test_megatrons_answer():
    with site(saying(*b"xyz")) as server:
        answer = put(
            server, {"prompts": ["ab", "c"], "tokens_to_generate": 2, "logprobs": True, "top_n_logprobs": 2}
        )
        plain = put(server, {"prompts": ["ab"], "tokens_to_generate": 1})
        first = server.engine.submitted[0]
    assert answer.json() == {
        "text": ["abxy", "cxy"],
        "tokens": [[97, 98, 120, 121], [99, 120, 121]],
        "segments": [["a", "b", "x", "y"], ["c", "x", "y"]],
        "logprobs": [[-0.5] * 3, [-0.5] * 2],
        "top_n_logprobs": [
            [{"b": -0.5, "c": -1.5}, {"x": -0.5, "y": -1.5}, {"y": -0.5, "z": -1.5}],
            [{"x": -0.5, "y": -1.5}, {"y": -0.5, "z": -1.5}],
        ],
    }
    assert (plain.json()["logprobs"], plain.json()["top_n_logprobs"]) == (None, None)
    assert first.sampling.greedy  # neither top_k nor top_p


def test_megatrons_sampling():
    with site(saying(120)) as server:
        put(
            server,
            {"prompts": ["a"], "top_p": 1, "temperature": 2, "random_seed": 4, "tokens_to_generate": 1},
        )
        put(server, {"prompts": ["a"], "top_k": 5, "stop_token": 3, "tokens_to_generate": 1})
        put(server, {"prompts": [""], "add_BOS": True, "tokens_to_generate": 1})
        one, two, three = server.engine.submitted
    assert (one.sampling.greedy, one.sampling.temperature, one.sampling.seed) == (False, 2.0, 4)
    assert (two.sampling.top_k, two.stop_ids) == (5, {3, 256})
    assert three.prompt == (256,)


@over_table(
    ("text", "flag", "expected"),
    [
        ("a\nb\n\nc", "stop_on_eol", "a\n"),
        ("a\nb\n\nc", "stop_on_double_eol", "a\nb\n\n"),
        ("abc", None, "abca"),
    ],
)
def test_megatrons_ends_at_lines(text, flag, expected):
    with site(saying(*text.encode())) as server:
        answer = put(
            server,
            {
                "prompts": ["p"],
                "tokens_to_generate": 4 if flag is None else 9,
                **({flag: True} if flag else {}),
            },
        )
    assert answer.json()["text"] == ["p" + expected]


@over_table(
    ("body", "param"),
    [
        ({}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": ["a"] * 129}, "prompts"),
        ({"prompts": [""]}, "prompts"),
        ({"prompts": ["a"], "max_len": 5}, "max_len"),
        ({"prompts": ["a"], "sentences": ["a"]}, "sentences"),
        ({"prompts": ["a"], "beam_width": 2}, "beam_width"),
        ({"prompts": ["a"], "top_p_decay": 0.5}, "top_p_decay"),
        ({"prompts": ["a"], "top_k": 2, "top_p": 0.5}, "top_k"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "tokens_to_generate"),
        ({"prompts": ["a"], "temperature": 0}, "temperature"),
        ({"prompts": ["a"], "top_k": 1001}, "top_k"),
        ({"prompts": ["a"], "stop_token": 999}, "stop_token"),
    ],
)
def test_megatrons_refusals_have_the_status_400(body, param):
    with site(saying(97)) as server:
        answer = put(server, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_megatrons_scoring_without_new_tokens():
    with site(saying(97)) as server:
        answer = put(server, {"prompts": ["abc"], "tokens_to_generate": 0, "logprobs": True})
    assert (answer.json()["text"], answer.json()["logprobs"]) == (["abc"], [[-0.5, -0.5]])


def test_miis_answer_and_defaults():
    with site(saying(*b"xy")) as server:
        answer = server.ask("/mii/tiny", {"prompts": ["ab", "c"], "max_new_tokens": 3})
        full = server.ask("/mii/tiny", {"prompts": "ab", "max_new_tokens": 1, "return_full_text": True})
        server.ask("/mii/tiny", {"prompts": ["ab"], "max_length": 10, "do_sample": False})
        first, last = server.engine.submitted[0], server.engine.submitted[-1]
        assert server.ask("/healthz").status_code == 200
        stream = server.ask("/mii/tiny", {"prompts": ["a"], "stream": True})
    assert answer.json() == [
        {"generated_text": "xyx", "prompt_length": 2, "generated_length": 3, "finish_reason": "length"},
        {"generated_text": "xyx", "prompt_length": 1, "generated_length": 3, "finish_reason": "length"},
    ]
    assert full.json()[0]["generated_text"] == "abx"
    assert (first.sampling.greedy, first.sampling.top_p, first.sampling.temperature) == (False, 0.9, 1.0)
    assert (last.sampling.greedy, last.max_tokens) == (True, 8)
    assert (stream.status_code, stream.json()["error"]["param"]) == (400, "stream")
