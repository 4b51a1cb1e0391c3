"""Rows of conversation data in the usual forms, as messages with a role and a content.

- `messages` or `conversations`: [{"role", "content"}] (OpenAI, TRL) or [{"from", "value"}] (ShareGPT)
- `instruction`, `input`, `output`, and maybe `system` and `history` (Alpaca)
- `prompt` and `completion`, both of messages, or both of plain text, to which no template applies
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ASSISTANT = "assistant"
_NAMES = ("system", "developer", "user", ASSISTANT, "tool", "function")
_ROLES = MappingProxyType({role: role for role in _NAMES})
_SPEAKERS = MappingProxyType(
    {**_ROLES, "human": "user", "gpt": ASSISTANT, "model": ASSISTANT, "observation": "tool"}
)
_KINDS = MappingProxyType(
    {bool: "a boolean", dict: "an object", str: "a string", list: "a list", type(None): "missing"}
)


class BadRow(Exception):
    """A row that cannot be used; says why, in a clause."""


@dataclass(frozen=True)
class Conversation:
    """A conversation.

    messages: the turns; given: how many of them only lead to the answers, whoever speaks; variables: what
    else the template is given; texts: prompt and completion of a row of plain text, which has no messages.
    """

    messages: list[dict[str, Any]]
    given: int = 0
    variables: dict[str, Any] = field(default_factory=dict)
    texts: tuple[str, str] | None = None

    @property
    def answers(self) -> dict[int, bool]:
        """The places of the assistant's turns, and whether they count: not with OpenAI's `weight` 0."""
        turns = {i: turn for i, turn in enumerate(self.messages) if turn["role"] == ASSISTANT}
        return {i: i >= self.given and turn.get("weight") != 0 for i, turn in turns.items()}


def read_row(line: bytes) -> Conversation:
    """The conversation of a line of JSON. Raises BadRow."""
    return _conversation(read_object(line))


def read_object(line: bytes) -> dict[str, Any]:
    """The object of a line of JSON. Raises BadRow."""
    try:
        row = json.loads(str(line, "utf-8-sig"))
        if b"\\ud" in line or b"\\uD" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise BadRow(f"it must be UTF-8, but byte {error.start + 1} is not") from error
    except UnicodeEncodeError as error:
        raise BadRow(f"it holds {error.object[error.start]!a}, half of a surrogate pair") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(f"it must be JSON, but is not ({error})") from error
    known: dict[str, Any] = _of_type(row, dict, "it must be an object")
    return known


def _conversation(row: dict[str, Any]) -> Conversation:
    variables = variables_of(row)
    for key in ("messages", "conversations"):
        if key in row:
            return Conversation(messages_of(key, row[key], row.get("system")), 0, variables)
    if "instruction" in row and "output" in row:
        return Conversation(_alpaca(row), 0, variables)
    if "prompt" not in row or "completion" not in row:
        raise BadRow(
            "it must have the keys `messages`, `conversations`, `instruction` and `output`, or `prompt` and "
            f"`completion`, but its keys are: {', '.join(list(row)[:5]) or 'none'}"
        )
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation([], texts=(prompt, completion))
    before = messages_of("prompt", prompt)
    return Conversation([*before, *messages_of("completion", completion)], len(before), variables)


def variables_of(row: dict[str, Any]) -> dict[str, Any]:
    """The variables that the template is given besides messages. Raises BadRow."""
    further = row.get("chat_template_kwargs") or {}
    variables: dict[str, Any] = _of_type(further, dict, "`chat_template_kwargs` must be an object")
    return {"tools": _tools(row.get("tools")), **variables}


def messages_of(key: str, turns: object, system: object = None) -> list[dict[str, Any]]:
    """Turns as messages, behind the system's text if the row has that by itself. Raises BadRow."""
    listed = _of_type(turns or None, list, f"`{key}` must be a list of messages")
    first = [] if system in (None, "") else [{"role": "system", "content": system}]
    return [_message(_of_type(turn, dict, "a message must be an object")) for turn in [*first, *listed]]


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    message, roles = turn, _ROLES
    if "role" not in turn and "from" in turn:
        message, roles = {"role": turn["from"], "content": turn.get("value")}, _SPEAKERS
    must = f"the role of a message must be one of {', '.join(roles)}"
    role = _of_type(message.get("role"), str, must)
    if role not in roles:
        raise BadRow(f"{must}, but is {role!r:.40}")
    content = message.get("content")
    if content is not None or not message.get("tool_calls"):
        _of_type(content, str, f"the content of a message ({role}) must be a string")
    return {**message, "role": roles[role]}


def _alpaca(row: dict[str, Any]) -> list[dict[str, Any]]:
    question = _of_type(row["instruction"], str, "`instruction` must be a string")
    if more := row.get("input"):
        question += "\n" + _of_type(more, str, "`input` must be a string")
    texts, must = [question, row["output"]], "`history` must be a list of pairs"
    for pair in reversed(_of_type(row.get("history") or [], list, must)):
        texts = [*_of_type(pair, list, must)[:2], *texts]
    turns = [{"role": (ASSISTANT if i % 2 else "user"), "content": text} for i, text in enumerate(texts)]
    return messages_of("instruction", turns, row.get("system"))


def _tools(tools: Any) -> Any:
    """The tools of a row; in tables without nested types, they are JSON in a string."""
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools or None
    except ValueError as error:
        raise BadRow(f"`tools` must be JSON, but is not ({error})") from error
    for tool in [] if tools is None else _of_type(tools, list, "`tools` must be a list of objects"):
        _of_type(tool, dict, "`tools` must be a list of objects")
    return tools


def _of_type(value: Any, kind: type, must: str) -> Any:
    if not isinstance(value, kind):
        raise BadRow(f"{must}, but is {_KINDS.get(type(value), 'a number')}")
    return value
