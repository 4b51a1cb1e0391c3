"""`/v1/completions`: what each field does, whole and as a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from megazero.data.tokenizers.simple import ByteLevelTokenizer, NullTokenizer
from megazero.serving.engine import EngineLimits
from megazero.serving.wanted import Token
from tests.serving.fake import saying
from tests.serving.http.client import events, site
from tests.tables import over_table

PATH = "/v1/completions"
HARD = "a私🙂, "


def says(text: str, **options):
    """A server that says this over and over."""
    return site(saying(*text.encode()), **options)


def test_a_completion_is_openais_object():
    with says("hello ") as server:
        answer = server.ask(PATH, {"model": "tiny", "prompt": "ab", "max_tokens": 5})
    body = answer.json()
    assert answer.status_code == 200
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert (body["model"], type(body["created"])) == ("tiny", int)
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}


@over_table(
    ("prompt", "tokens"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
        ("", [[256]]),
        (["", "a"], [[256], [97]]),
        ([[]], [[256]]),
        ([], [[256]]),
        (None, [[256]]),
    ],
)
def test_prompts_of_all_forms(prompt, tokens):
    with says("x") as server:
        answer = server.ask(PATH, {"prompt": prompt, "max_tokens": 1})
        assert [list(wanted.prompt) for wanted in server.engine.submitted] == tokens
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(tokens)))


def test_without_max_tokens_there_are_sixteen():
    with says("x") as server:
        assert server.ask(PATH, {"prompt": "a"}).json()["choices"][0]["text"] == "x" * 16


def test_fields_reach_the_engine():
    body = {
        **{"prompt": "a", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1},
        **{"seed": 11, "frequency_penalty": 0.3, "presence_penalty": -0.4, "repetition_penalty": 1.2},
        **{"logit_bias": {"65": -100, "66": 2.5}, "stop_token_ids": [5], "min_tokens": 2, "cache_salt": "me"},
    }
    with says("x") as server:
        server.ask(PATH, body)
        server.ask(PATH, {**body, "temperature": 0, "ignore_eos": True, "top_k": -1, "n": 2})
        first, second, third = server.engine.submitted
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.greedy, sampling.seed, sampling.vocab_size) == (False, 11, 257)
    penalties = first.penalties
    assert (penalties.repetition, penalties.frequency, penalties.presence) == (1.2, 0.3, -0.4)
    assert dict(penalties.logit_bias) == {65: -100.0, 66: 2.5}
    assert (first.stop_ids, first.min_tokens, first.salt) == ({5, 256}, 2, "me")
    assert (second.sampling.greedy, second.sampling.top_k, second.stop_ids) == (True, 0, {5})
    assert (second.number, third.number) == (0, 1)


def test_a_seed_is_new_each_time_unless_it_is_given():
    with says("x") as server:
        for seed in (None, None, 3, 3):
            server.ask(PATH, {"prompt": "a", "max_tokens": 1, "seed": seed})
        seeds = [wanted.sampling.seed for wanted in server.engine.submitted]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [3, 3]


def test_the_engine_gets_all_choices_at_once_so_that_they_share_a_prefill():
    with says("abc", paused=True) as server:
        calls = []
        submit = server.engine.submit
        server.engine.submit = lambda wanted, listeners: (
            calls.append(len(wanted)),
            submit(wanted, listeners),
        )[1]
        server.engine.go.set()
        answer = server.ask(PATH, {"prompt": ["a", "b"], "n": 3, "max_tokens": 2}).json()
    assert calls == [6]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}


def test_echo_without_new_tokens_scores_a_prompt():
    body = {"prompt": [[97, 98, 99]], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    with says("x") as server:
        (choice,) = server.ask(PATH, body).json()["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5}, {"c": -0.5}],
        "text_offset": [0, 1, 2],
    }


def test_offsets_count_characters_of_the_prompt_and_the_text():
    body = {"prompt": HARD, "max_tokens": 10, "echo": True, "logprobs": 0}
    with says(HARD) as server:
        whole = server.ask(PATH, body).json()["choices"][0]
        parts = events(server.ask(PATH, {**body, "stream": True}))[:-1]
    assert whole["text"] == HARD * 2
    once = [0, 1, 1, 1, 2, 2, 2, 2, 3, 4]
    assert whole["logprobs"]["text_offset"] == [*once, *(5 + place for place in once)]
    assert whole["logprobs"]["tokens"][0] == "a"
    streamed = [part["choices"][0]["logprobs"] for part in parts]
    for key, values in whole["logprobs"].items():
        assert [value for part in streamed for value in part[key]] == values


@over_table(
    ("options", "text", "reason", "tokens"),
    [
        ({"stop": "b,c"}, "a, ", "stop", 6),
        ({"stop": ["zzz", "c"]}, "a, b,", "stop", 6),
        ({"stop": "b,c", "include_stop_str_in_output": True}, "a, b,c", "stop", 6),
        ({"stop": "never"}, "a, b,c d", "length", 8),
        ({"stop": "a", "min_tokens": 1}, "a, b,c d", "length", 8),
        ({"stop_token_ids": [99]}, "a, b,", "stop", 6),
        ({"stop": "a"}, "", "stop", 1),
    ],
)
def test_stops(options, text, reason, tokens):
    body = {"prompt": "p", "max_tokens": 8, **options}
    with says("a, b,c d") as server:
        answer = server.ask(PATH, body).json()
        streamed = events(server.ask(PATH, {**body, "stream": True}))
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    assert answer["usage"]["completion_tokens"] == tokens
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == text
    assert [event["choices"][0]["finish_reason"] for event in streamed[:-1]][-1] == reason
    assert all("b,c" not in event["choices"][0]["text"] for event in streamed[:-1]) or "include" in str(
        options
    )


def test_a_stopped_choice_is_cancelled_in_the_engine():
    with says("abc") as server:
        server.ask(PATH, {"prompt": "p", "max_tokens": 200, "stop": "c"})
        assert server.engine.cancelled == [0]
        assert server.service.open == 0


def test_scores_end_with_the_token_that_the_stop_begins_in():
    with says("a, b,c d") as server:
        body = {"prompt": "p", "max_tokens": 8, "stop": "b,c", "logprobs": 0}
        answer = server.ask(PATH, body).json()
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", ",", " ", "b"]
    assert answer["usage"]["completion_tokens"] == 6


def test_the_end_of_a_document_ends_a_text_and_is_not_shown():
    with site(saying(97, 256, 98)) as server:
        body = {"prompt": "p", "max_tokens": 3}
        answer = server.ask(PATH, body).json()
        on = server.ask(PATH, {**body, "ignore_eos": True}).json()
        shown = server.ask(PATH, {**body, "ignore_eos": True, "skip_special_tokens": False}).json()
        later = server.ask(PATH, {**body, "min_tokens": 2}).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a", "stop")
    assert answer["usage"]["completion_tokens"] == 2
    assert on["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "a<|endoftext|>b"
    assert later["choices"][0]["finish_reason"] == "length"


def test_a_stream_adds_up_to_the_whole_answer_for_every_choice():
    body = {"prompt": ["p", "q"], "n": 2, "max_tokens": 23, "stop": "zz", "echo": True}
    with says(HARD) as server:
        whole = server.ask(PATH, body).json()
        answer = server.ask(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}})
    got = events(answer)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert got[-1] == "[DONE]"
    assert got[-2]["choices"] == []
    assert got[-2]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in got[:-2])
    assert len({event["id"] for event in got[:-1]}) == 1
    for i, choice in enumerate(whole["choices"]):
        mine = [event["choices"][0] for event in got[:-2] if event["choices"][0]["index"] == i]
        assert "".join(part["text"] for part in mine) == choice["text"]
        reasons = [part["finish_reason"] for part in mine]
        assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["text"] == ""


def test_a_character_is_never_split_and_lost_bytes_come_at_last():
    with site(saying(0xFF)) as server:
        got = events(server.ask(PATH, {"prompt": "p", "max_tokens": 40, "stream": True}))
        whole = server.ask(PATH, {"prompt": "p", "max_tokens": 40}).json()["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in got[:-1]) == whole == "\ufffd" * 40
    with says("私") as server:
        got = events(server.ask(PATH, {"prompt": "p", "max_tokens": 5, "stream": True}))
    texts = [event["choices"][0]["text"] for event in got[:-1]]
    assert [text for text in texts if text] == ["私", "\ufffd"]


def test_tokens_with_one_text_do_not_collide():
    with site(saying(0xE7)) as server:
        body = {"prompt": "p", "max_tokens": 1, "logprobs": 3}
        named = server.ask(PATH, body).json()["choices"][0]["logprobs"]
    assert named["top_logprobs"] == [{"\ufffd": -0.5, "token_id:232": -1.5, "token_id:233": -2.5}]


def test_minus_infinity_is_a_number_of_json():
    with says("x") as server:
        server.engine._token = lambda token, best: Token(token, -math.inf, ((1, -math.inf),))
        body = {"prompt": "p", "max_tokens": 1, "logprobs": 1}
        answer = server.ask(PATH, body).json()["choices"][0]["logprobs"]
    assert answer["token_logprobs"] == [-9999.0]
    assert set(answer["top_logprobs"][0].values()) == {-9999.0}


@over_table(
    ("size", "new", "status", "param"),
    [
        (31, 1, 200, None),
        (32, 0, 200, None),
        (32, 1, 400, "prompt"),
        (33, 0, 400, "prompt"),
        (30, 3, 400, "max_tokens"),
        (1, 1000, 400, "max_tokens"),
    ],
)
def test_a_prompt_that_is_too_long_names_the_context(size, new, status, param):
    with says("x", limits=EngineLimits(max_length=32)) as server:
        answer = server.ask(PATH, {"prompt": [1] * size, "max_tokens": new})
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert (
            f"at most 32 tokens together, but the prompt has {size} and `max_tokens` is {new}"
            in error["message"]
        )


def test_more_tokens_than_all_pages_are_refused_at_the_door():
    with says("x", limits=EngineLimits(max_length=4096, pages=2, page=16)) as server:
        answer = server.ask(PATH, {"prompt": "a", "max_tokens": 32})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_ids_that_the_tokenizer_lacks_are_refused():
    with says("x") as server:
        answer = server.ask(PATH, {"prompt": [257]})
    assert answer.status_code == 400
    assert "from 0 to 256, but one is 257" in answer.json()["error"]["message"]


def test_an_empty_prompt_needs_an_end_of_document():
    class Endless(ByteLevelTokenizer):
        eod = None

    with site(saying(1), tokenizer=Endless()) as server:
        answer = server.ask(PATH, {"prompt": ""})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "`prompt` must have a token, but is empty; write at least one"


def test_text_that_the_tokenizer_refuses():
    with site(saying(1), tokenizer=NullTokenizer(9)) as server:
        assert server.ask(PATH, {"prompt": "1 2", "max_tokens": 2}).json()["choices"][0]["text"] == " 1 1"
        answer = server.ask(PATH, {"prompt": "word"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_first_tokens_of_other_libraries_models_are_put_before_texts_once():
    with says("x") as server:
        server.service.first_ids = (7,)
        bodies: Sequence[dict] = (
            {"prompt": "a"},
            {"prompt": "a", "add_special_tokens": False},
            {"prompt": [97]},
            {"prompt": "\x07a"},
        )
        for body in bodies:
            server.ask(PATH, {**body, "max_tokens": 1})
        assert [list(wanted.prompt) for wanted in server.engine.submitted] == [[7, 97], [97], [97], [7, 97]]
