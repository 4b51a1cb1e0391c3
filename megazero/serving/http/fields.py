"""The fields of a request: a table for each endpoint, and one function that reads a body by it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["integer", "number", "boolean", "string", "strings", "object", "list", "anything"]
_DEEPEST = 32
_TYPES: Mapping[Kind, tuple[str, tuple[type, ...]]] = MappingProxyType(
    {
        "integer": ("an integer", (int,)),
        "number": ("a number", (int, float)),
        "boolean": ("true or false", (bool,)),
        "string": ("a string", (str,)),
        "strings": ("a string or a list of strings", (str, list)),
        "object": ("an object", (dict,)),
        "list": ("a list", (list,)),
        "anything": ("any value", (object,)),
    }
)


class Refusal(Exception):
    """A request that is not answered, as OpenAI's clients know errors.

    Args:
        message: what is wrong, in a sentence.
        param: the field that is wrong.
        status: the status of HTTP.
        code: the word that programs look for.
        retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Field:
    """A field of a request: its type, least and largest value (of strings: characters), and default."""

    name: str
    kind: Kind
    low: float = -math.inf
    high: float = math.inf
    default: Any = None

    def check(self, value: object) -> Any:
        """The value, strings as a list. Raises Refusal unless it has the type and lies in the range."""
        words, types = _TYPES[self.kind]
        wrong = not isinstance(value, types) or (
            isinstance(value, bool) and self.kind in ("integer", "number")
        )
        if self.kind == "strings" and not wrong:
            value = [value] if isinstance(value, str) else value
            assert isinstance(value, list), "of these types"
            wrong = not all(isinstance(text, str) for text in value)
        if wrong:
            raise Refusal(f"`{self.name}` must be {words}, but is {shown(value)}", self.name)
        for amount in self._amounts(value):
            if not self.low <= amount <= self.high:
                raise Refusal(
                    f"`{self.name}` must be {words}, {self._range}, but is {shown(value)}", self.name
                )
        return value

    def _amounts(self, value: Any) -> list[float]:
        if self.kind in ("integer", "number"):
            return [value]
        return [len(text) for text in value] if self.kind == "strings" else []

    @property
    def _range(self) -> str:
        if self.kind == "strings":
            return f"of {self.low:g} to {self.high:g} characters"
        return f"from {self.low:g} to {self.high:g}"


_SAMPLING = (
    Field("model", "string"),
    Field("max_tokens", "integer", 0, 1 << 31),
    Field("temperature", "number", 0, 100, 1.0),
    Field("top_p", "number", 1e-9, 1, 1.0),
    Field("top_k", "integer", -1, 1 << 31, 0),
    Field("min_p", "number", 0, 1, 0.0),
    Field("stop", "strings", 1, 1024, []),
    Field("seed", "integer", -(1 << 63), (1 << 63) - 1),
    Field("frequency_penalty", "number", -2, 2, 0.0),
    Field("presence_penalty", "number", -2, 2, 0.0),
    Field("repetition_penalty", "number", 1e-9, 100, 1.0),
    Field("logit_bias", "object", default={}),
    Field("user", "string"),
    Field("stream", "boolean", default=False),
    Field("stream_options", "object"),
    Field("ignore_eos", "boolean", default=False),
    Field("min_tokens", "integer", 0, 1 << 31, 0),
    Field("stop_token_ids", "list", default=[]),
    Field("include_stop_str_in_output", "boolean", default=False),
    Field("skip_special_tokens", "boolean", default=True),
    Field("cache_salt", "string", default=""),
    Field("n", "integer", 1, 128, 1),
)
COMPLETIONS = (
    *_SAMPLING,
    Field("prompt", "anything"),
    Field("echo", "boolean", default=False),
    Field("logprobs", "integer", 0, 5),
    Field("best_of", "integer", 1, 128),
    Field("add_special_tokens", "boolean", default=True),
)
CHAT = (
    *_SAMPLING,
    Field("messages", "list"),
    Field("max_completion_tokens", "integer", 0, 1 << 31),
    Field("logprobs", "boolean", default=False),
    Field("top_logprobs", "integer", 0, 20),
    Field("add_special_tokens", "boolean", default=False),
    Field("add_generation_prompt", "boolean", default=True),
    Field("continue_final_message", "boolean", default=False),
    Field("chat_template", "string"),
    Field("chat_template_kwargs", "object", default={}),
)
REFUSED = (
    *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "response_format"),
    *("suffix", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("lora_name", "lora_request", "adapter", "speculative_config", "num_speculative_tokens", "modalities"),
    *("audio", "prediction", "logits_processors", "web_search_options", "use_beam_search"),
    *("prompt_logprobs", "truncate_prompt_tokens", "return_tokens_as_token_ids"),
)
"""Fields of OpenAI's and vLLM's requests that ask for what is not there."""


def parse(content: bytes) -> dict[str, Any]:
    """The object of a body. Raises Refusal unless it is one, of text that can be encoded, not too deep."""

    def refuse(word: str) -> float:
        raise ValueError(f"{word} is no JSON")

    try:
        body = json.loads(content, parse_constant=refuse)
        if b"\\ud" in content.lower():
            json.dumps(body, ensure_ascii=False).encode()
        if _depth(body) > _DEEPEST:
            raise ValueError(f"it is deeper than {_DEEPEST} levels")
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"the body must be JSON, but is not: {str(error)[:200]}", code="invalid_json"
        ) from error
    if not isinstance(body, dict):
        raise Refusal(f"the body must be an object of JSON, but is {shown(body)}")
    return body


def read(body: Mapping[str, Any], fields: Sequence[Field]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of all fields, null for the default, and the names of unknown fields.

    Raises:
        Refusal: a value has another type or is out of range, or a field asks for what is not there.
    """
    known = {field.name for field in fields}
    for name in REFUSED:
        if (
            name not in known
            and name in body
            and body[name] not in (None, False, "", [], {}, "none", {"type": "text"})
        ):
            raise Refusal(
                f"`{name}` must be left out: this server has no such thing", name, code="unsupported"
            )
    values = {
        field.name: field.default if body.get(field.name) is None else field.check(body[field.name])
        for field in fields
    }
    return values, tuple(sorted(body.keys() - known - {*REFUSED}))


def integers(values: Mapping[str, Any], name: str, below: int) -> list[int]:
    """The ids in a list. Raises Refusal unless they are integers from 0 on, below this."""
    for value in values[name]:
        if type(value) is not int or not 0 <= value < below:
            raise Refusal(
                f"`{name}` must hold token ids from 0 to {below - 1}, but one is {shown(value)}", name
            )
    return list(values[name])


def shown(value: object) -> str:
    """A value as a message shows it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _depth(value: object) -> int:
    deep, rest = 0, [value]
    while rest:
        deep += 1
        rest = [
            inner
            for outer in rest
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return deep
