"""`/v1/chat/completions`, with a tokenizer's own chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from megazero.data.tokenizers.library import load_tokenizer_json
from megazero.serving.engine import EngineLimits
from tests.data.conversations.templates import CHATML, STYLES
from tests.data.conversations.tokenizer import byte_level, word_marks, write_folder
from tests.serving.fake import saying
from tests.serving.http.client import events, site
from tests.tables import over_table

transformers = pytest.importorskip("transformers")
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi, who?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("chat"), byte_level(), CHATML, eos="<|im_end|>")


def chats(folder: Path, text: str = "I am. ", **options):
    """A server that says this over and over in a chat."""
    tokenizer = load_tokenizer_json(str(folder), "HFTokenizer")
    return site(saying(*tokenizer.encode(text)), tokenizer=tokenizer, template=folder, **options)


def prompt_of(server) -> str:
    return server.service.texts.tokenizer.decode(server.engine.submitted[-1].prompt)


def test_a_chat_is_openais_object(folder):
    with chats(folder) as server:
        answer = server.ask(PATH, {"messages": MESSAGES, "max_tokens": 4, "model": "other"})
        assert prompt_of(server) == "<|im_start|>user\nHi, who?<|im_end|>\n<|im_start|>assistant\n"
        size = len(server.engine.submitted[0].prompt)
    body = answer.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": body["choices"][0]["message"]["content"],
                "refusal": None,
            },
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["choices"][0]["message"]["content"].startswith("I am")
    assert body["usage"] == {"prompt_tokens": size, "completion_tokens": 4, "total_tokens": size + 4}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("words", [False, True])
def test_prompts_are_those_of_transformers_and_begin_with_one_bos(tmp_path, style, words):
    backend = word_marks() if words else byte_level()
    write_folder(tmp_path, backend, STYLES[style])
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "A llama."},
        {"role": "user", "content": "Thanks 🙂"},
    ]
    with chats(tmp_path) as server:
        assert server.ask(PATH, {"messages": turns, "max_tokens": 1}).status_code == 200
        got = list(server.engine.submitted[0].prompt)
        assert (
            server.ask(PATH, {"messages": turns, "max_tokens": 1, "add_special_tokens": True}).status_code
            == 200
        )
        again = list(server.engine.submitted[1].prompt)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert got == list(expected)
    begin = theirs.convert_tokens_to_ids("<s>")
    assert [begin, begin] not in (got[:2], again[:2])


def test_options_of_the_template(folder):
    turns = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    with chats(folder) as server:
        body = {"messages": turns, "max_tokens": 1}
        server.ask(PATH, {**body, "add_generation_prompt": False})
        assert prompt_of(server).endswith("assistant\nI am<|im_end|>\n")
        server.ask(PATH, {**body, "add_generation_prompt": False, "continue_final_message": True})
        assert prompt_of(server).endswith("assistant\nI am")
        own = "{{ messages[0].content }}|{{ more }}"
        server.ask(PATH, {**body, "chat_template": own, "chat_template_kwargs": {"more": "than"}})
        assert prompt_of(server) == "Hi, who?|than"
        both = server.ask(PATH, {**body, "continue_final_message": True})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "add_generation_prompt")


def test_contents_may_be_lists_of_texts(folder):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    with chats(folder) as server:
        server.ask(PATH, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
        assert "user\none\ntwo<|im_end|>" in prompt_of(server)


@over_table(
    ("messages", "said"),
    [
        (None, "`messages` must be a list with a message, but is null"),
        ([], "but is []"),
        (["hi"], 'but one is "hi"'),
        ([{"role": "wizard", "content": "x"}], "objects with a role of system, "),
        ([{"role": ["user"], "content": "x"}], "objects with a role of system, "),
        ([{"role": "user"}], "but one is null"),
        ([{"role": "user", "content": 3}], "but one is 3"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "a list of {type: text, text}",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], "a list of {type: text, text}"),
        ([{"role": "user", "content": ["x"]}], "a list of {type: text, text}"),
    ],
)
def test_wrong_messages(folder, messages, said):
    with chats(folder) as server:
        answer = server.ask(PATH, {"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert said in answer.json()["error"]["message"]


def test_without_a_template_a_chat_is_refused_and_a_template_may_be_given(tmp_path):
    write_folder(tmp_path, byte_level(), None)
    with chats(tmp_path) as server:
        answer = server.ask(PATH, {"messages": MESSAGES})
        given = server.ask(
            PATH, {"messages": MESSAGES, "max_tokens": 1, "chat_template": "{{ messages[0].content }}"}
        )
    assert answer.status_code == 400
    assert "must have a chat template to answer chats, but has none" in answer.json()["error"]["message"]
    assert given.status_code == 200
    with site() as server:  # a tokenizer that cannot have one
        answer = server.ask(PATH, {"messages": MESSAGES})
    assert answer.status_code == 400
    assert "but has none; use /v1/completions" in answer.json()["error"]["message"]


@over_table(
    "template",
    [
        "{{ raise_exception('no system here') }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.x.y }}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault(folder, template):
    with chats(folder) as server:
        answer = server.ask(PATH, {"messages": MESSAGES, "chat_template": template})
    assert answer.status_code == 400
    assert "must accept the messages, but refuses them" in answer.json()["error"]["message"]


def test_without_max_tokens_a_chat_may_fill_the_context(folder):
    with chats(folder, limits=EngineLimits(max_length=64)) as server:
        answer = server.ask(PATH, {"messages": MESSAGES})
        (wanted,) = server.engine.submitted
        assert answer.json()["usage"]["total_tokens"] == 64 == len(wanted.prompt) + wanted.max_tokens
        server.ask(PATH, {"messages": MESSAGES, "max_tokens": 9, "max_completion_tokens": 2})
        assert server.engine.submitted[-1].max_tokens == 2
        long = server.ask(PATH, {"messages": [{"role": "user", "content": "x" * 99}]})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_stream_begins_with_the_role_and_ends_with_an_empty_delta(folder):
    body = {"messages": MESSAGES, "max_tokens": 6, "n": 2, "seed": 1}
    with chats(folder) as server:
        whole = server.ask(PATH, body).json()
        got = events(server.ask(PATH, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert got[-1] == "[DONE]"
    assert (got[-2]["choices"], got[-2]["usage"]) == ([], whole["usage"])
    assert {event["object"] for event in got[:-1]} == {"chat.completion.chunk"}
    for i in range(2):
        mine = [event["choices"][0] for event in got[:-2] if event["choices"][0]["index"] == i]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert (mine[-1]["delta"], mine[-1]["finish_reason"]) == ({}, "length")
        said = "".join(part["delta"].get("content", "") for part in mine)
        assert said == whole["choices"][i]["message"]["content"]
        assert all("role" not in part["delta"] for part in mine[1:])


def test_log_probabilities_of_a_chat(folder):
    with chats(folder, "é") as server:
        body = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        rows = server.ask(PATH, body).json()["choices"][0]["logprobs"]["content"]
        none = server.ask(PATH, {**body, "top_logprobs": 0}).json()["choices"][0]["logprobs"]["content"]
        parts = events(server.ask(PATH, {**body, "stream": True}))[:-1]
        alone = server.ask(PATH, {"messages": MESSAGES, "top_logprobs": 2})
    assert [row["bytes"] for row in rows] == [None, None]  # parts of a character
    assert [len(row["top_logprobs"]) for row in rows] == [2, 2]
    assert rows[0]["logprob"] == rows[0]["top_logprobs"][0]["logprob"] == -0.5
    assert [row["top_logprobs"] for row in none] == [[], []]
    streamed = [event["choices"][0]["logprobs"] for event in parts]
    assert [row for part in streamed if part for row in part["content"]] == rows
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "top_logprobs")


def test_a_named_token_has_its_bytes(folder):
    with chats(folder, "is") as server:
        body = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True}
        row = server.ask(PATH, body).json()["choices"][0]["logprobs"]["content"][0]
    assert bytes(row["bytes"]).decode() == row["token"]


def test_special_tokens_of_the_template_end_an_answer_and_are_not_shown(folder):
    tokenizer = load_tokenizer_json(str(folder), "HFTokenizer")
    text = [*tokenizer.encode("Hi"), tokenizer.eod, *tokenizer.encode("no")]
    with site(saying(*text), tokenizer=tokenizer, template=folder) as server:
        answer = server.ask(PATH, {"messages": MESSAGES, "max_tokens": 50}).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Hi", "stop")
