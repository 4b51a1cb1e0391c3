"""Rows of each form, and what is said of bad ones."""

from __future__ import annotations

import json

import pytest

from megazero.data.conversations.rows import BadRow, read_row
from tests.tables import over_table

U, A, S = ({"role": role, "content": role[0]} for role in ("user", "assistant", "system"))
SPOKEN = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]


def row(**keys) -> bytes:
    return json.dumps(keys).encode()


@over_table(
    "line, messages",
    [
        (row(messages=[S, U, A]), [S, U, A]),
        (row(messages=[{**U, "name": "x"}]), [{**U, "name": "x"}]),
        (row(conversations=SPOKEN), [U, A]),
        (row(conversations=SPOKEN, system="s"), [S, U, A]),
        (row(messages=SPOKEN, system=""), [U, A]),
        (row(instruction="u", output="a"), [U, A]),
        (row(instruction="u", input="", output="a", text="the same"), [U, A]),
        (row(instruction="u", input="v", output="a"), [{**U, "content": "u\nv"}, A]),
        (
            row(instruction="u", output="a", history=[["x", "y"]], system="s"),
            [S, {**U, "content": "x"}, {**A, "content": "y"}, U, A],
        ),
        (row(prompt=[S, U], completion=[A]), [S, U, A]),
        (row(prompt="u", completion="a"), []),
    ],
)
def test_forms(line, messages):
    assert read_row(line).messages == messages


def test_what_comes_with_the_messages():
    plain = read_row(row(prompt="u", completion="a"))
    assert (plain.texts, plain.answers) == (("u", "a"), {})
    made = read_row(
        row(messages=[U, A], tools='[{"name": "t"}]', chat_template_kwargs={"enable_thinking": False})
    )
    assert made.variables == {"tools": [{"name": "t"}], "enable_thinking": False}
    assert read_row(row(messages=[U, A, U, {**A, "weight": 0}])).answers == {1: True, 3: False}
    assert read_row(row(prompt=[U, A, U], completion=[A])).answers == {1: False, 3: True}


@over_table(
    "line, says",
    [
        (b"{", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[1]", "must be an object, but is a list"),
        (b'{"messages": "\xff"}', "must be UTF-8, but byte 15"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "half of a surrogate pair"),
        (row(text="a"), "must have the keys .* its keys are: text"),
        (row(), "its keys are: none"),
        (row(messages=[]), "`messages` must be a list of messages"),
        (row(conversations="a"), "`conversations` must be .* but is a string"),
        (row(messages=[3]), "a message must be an object, but is a number"),
        (row(messages=[{"role": "asistant", "content": "a"}]), "one of system, .* but is 'asistant'"),
        (row(messages=[{"role": "human", "content": "a"}]), "but is 'human'"),
        (row(messages=[{"from": "bot", "value": "a"}]), "human, gpt, .* but is 'bot'"),
        (row(messages=[{"content": "a"}]), "role of a message .* but is missing"),
        (row(messages=[{"role": "user"}]), r"content of a message \(user\) must be a string, but is missing"),
        (row(messages=[{"role": "user", "content": [{"type": "text"}]}]), "must be a string, but is a list"),
        (row(messages=[U], tools="{"), "`tools` must be JSON"),
        (row(messages=[U], tools=["t"]), "`tools` must be a list of objects, but is a string"),
        (row(messages=[U], chat_template_kwargs=[1]), "must be an object, but is a list"),
        (row(instruction=None, output="a"), "`instruction` must be a string"),
        (row(instruction="u", input=1, output="a"), "`input` must be a string, but is a number"),
        (
            row(instruction="u", output="a", history=["x"]),
            "`history` must be a list of pairs, but is a string",
        ),
        (row(prompt="u", completion=[A]), "`prompt` must be a list of messages, but is a string"),
    ],
)
def test_bad_rows(line, says):
    with pytest.raises(BadRow, match=says):
        read_row(line)
