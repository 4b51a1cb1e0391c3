"""Load the object of a DeepSpeed JSON file, or say what is wrong with the file, and where."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.config.bounded import bounded_text
from megazero.config.deepspeed.relaxed import Relaxed, relaxed
from megazero.config.words import Few
from megazero.errors import ConfigError
from megazero.regular_file import why_unreadable

_TEXT = r'"(?:\\.|[^"\\])*"'
_TOKEN = re.compile(_TEXT + r"|[{}\[\]:,]")
_CONSTANT = re.compile(_TEXT + r"|(-?(?:NaN|Infinity))")
_LONG_NUMBER = re.compile(_TEXT + r"|(\d{4301,})")
_WORD = re.compile(r"\$\{\w+\}|\{+ *\w+ *\}+|<[\w -]+>|[@$%]?[\w.-]+[@%]?")
_LITERALS: Mapping[str, str] = MappingProxyType(
    {"true": "true", "false": "false", "none": "null", "null": "null", "nan": "a number"}
)
"""A value as other notations write it -> the value that JSON has."""


@dataclass(frozen=True)
class Fault:
    """A fault of a text that should be JSON: its position, the reason, and what to do about it."""

    position: int
    reason: str
    remedy: str

    def sentence(self, name: str, text: Relaxed) -> str:
        """Return the complaint about the file `name`."""
        where = f"{name}:{text.place(self.position)}"
        return f"{where}: the file must be valid JSON, but {self.reason}; {self.remedy}."


class _Constant(ValueError):
    pass


def load_json(source: str | os.PathLike[str]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the object that a file holds, and the reasons to refuse the file, as sentences.

    Where there are reasons, the object may be empty. `source` may also be the file's text itself in base64,
    as accelerate's launcher passes it.
    """
    if (text := _decoded(source)) is not None:
        return read_json(text, "the DeepSpeed configuration")
    path = Path(source)
    try:
        text = bounded_text(path)
    except OSError as error:
        return {}, [f"`--deepspeed_config` must name a readable file, but {path}: {why_unreadable(error)}."]
    except UnicodeDecodeError as error:
        return {}, [f"{path}: the file must be UTF-8, but has {error.reason}; save it as UTF-8."]
    return read_json(text, str(path))


def load_ds_config(config: object) -> dict[str, Any]:
    """Return the content of a JSON: of a file, a text in base64, a dictionary, or a `DeepSpeedConfig`.

    Raises:
        ConfigError: it is none of these, or names everything that is wrong with the text.
    """
    content = getattr(config, "_param_dict", config)
    if isinstance(content, Mapping):
        return dict(plain_paths(content))
    if not isinstance(content, (str, os.PathLike)):
        raise ConfigError(
            "`config` must be a path, a dictionary or a DeepSpeedConfig, but is a "
            f"{type(content).__name__}; pass one of these"
        )
    document, faults = load_json(content)
    if faults:
        raise ConfigError(faults)
    return dict(document)


def _decoded(source: str | os.PathLike[str]) -> str | None:
    """Decode a text in base64; None if `source` is not such a text, or names a file."""
    if not isinstance(source, str) or os.path.exists(source):
        return None
    try:
        text = base64.b64decode(source, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def plain_paths(value: object) -> Any:
    """Return a JSON's content with path objects as text."""
    if isinstance(value, Mapping):
        return {key: plain_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_paths(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def read_json(given: str, name: str) -> tuple[Mapping[str, object], list[str]]:
    """Return the object that a text holds, and the reasons to refuse it, as `load_json` does."""
    text = relaxed(given.removeprefix("\ufeff"))
    repeats: list[bool] = []

    def pairs_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
        content = dict(pairs)
        repeats.append(len(content) < len(pairs))
        return content

    try:
        document = json.loads(text.json, object_pairs_hook=pairs_of, parse_constant=_no_constant)
    except RecursionError:  # within the parser; what it can read is judged by the caller
        return {}, [f"{name}: the file must not be nested this deeply."]
    except ValueError as error:
        return {}, [_fault(text.json, error).sentence(name, text)]
    if not isinstance(document, dict):
        return {}, [f"{name}: the file must hold one JSON object."]
    return document, _repeated(name, text) if any(repeats) else []


def _no_constant(name: str) -> None:
    raise _Constant(name)


def _fault(text: str, error: ValueError) -> Fault:
    if isinstance(error, _Constant):
        return Fault(_first(_CONSTANT, text), f"{error} is no number there", "write a finite number")
    if not isinstance(error, json.JSONDecodeError):
        return Fault(_first(_LONG_NUMBER, text), "a number has too many digits", "write it shorter")
    within_text = error.msg.startswith("Invalid")
    position = error.pos if within_text else len(text) - len(text[error.pos :].lstrip())
    rest, before = text[position:], text[:position].rstrip()
    if not rest:
        reason = "it ends before it is whole" if before else "it is empty"
        return Fault(len(before), reason, "close what is open" if before else "write an object in braces")
    return _fault_at(position, rest, error.msg)


def _fault_at(position: int, rest: str, message: str) -> Fault:
    """Return the fault at `position`, where the parser stopped with `message` before `rest`."""
    word = _WORD.match(rest)
    if rest.startswith(("/*", "'")):
        return Fault(position, "what begins there has no end", "close it")
    if word and word[0].lower() in _LITERALS:
        return Fault(position, f"`{word[0]}` is no value there", f"write {_LITERALS[word[0].lower()]}")
    if word and message.startswith("Expecting value"):
        return Fault(position, f"`{word[0]}` is a placeholder or has no quotes", "write the value itself")
    for start, reason, remedy in _OF_PARSER:
        if message.startswith(start):
            return Fault(position, reason, remedy)
    return Fault(position, f"the parser says: {message}", "correct it")


_OF_PARSER = (
    ("Expecting ','", "a comma or a closing bracket is missing", "add it before this place"),
    ("Expecting ':'", "a colon is missing after a key", "add it before this place"),
    ("Unterminated string", "a text has no closing quote", "close it"),
    ("Invalid control character", "a text runs over the end of its line", "close it, or write \\n"),
    ("Invalid \\", "a backslash begins no escape that JSON knows", "write two of them"),
    ("Extra data", "something follows the object", "remove it"),
)
"""The beginning of a message of Python's parser, the fault, and what to do."""


def _first(pattern: re.Pattern[str], text: str) -> int:
    """Return the first position outside strings at which the pattern's group matches."""
    return next((match.start() for match in pattern.finditer(text) if match[1]), 0)


def _repeated(name: str, text: Relaxed) -> list[str]:
    """Return a sentence on each key that its object has already."""
    problems: list[str] = []
    others = Few("repeated keys")
    for key, position, first in _repeated_keys(text.json):
        others.add(problems, _sentence_of(name, text, key, position, first))
    return problems + [f"{name}: {line}" for line in others.rest()]


def _sentence_of(name: str, text: Relaxed, key: str, position: int, first: int) -> Callable[[], str]:
    return lambda: (
        f"{name}:{text.place(position)}: `{key}` must be given once, but is given on line "
        f"{text.line(first)} too."
    )


def _repeated_keys(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield each repeated key, its position, and the position of its first occurrence."""
    open_objects: list[dict[str, int]] = []
    for token, following in pairwise(_TOKEN.finditer(text)):
        if token[0] in "{[":
            open_objects.append({})
        elif token[0] in "}]":
            open_objects.pop()
        elif following[0] == ":":
            key = json.loads(token[0])
            first = open_objects[-1].setdefault(key, token.start())
            if first != token.start():
                yield key, token.start(), first
