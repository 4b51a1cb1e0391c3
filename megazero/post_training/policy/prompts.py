"""Prompts from files: their tokens, what reward functions see of them, and their order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megazero.config.tree.config import Config
from megazero.data.shuffle import cyclic_sample
from megazero.data.tokenizers.base import is_failure
from megazero.errors import DataError
from megazero.regular_file import read_regular
from megazero.train.parts.vocabulary import Vocabulary


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        ids: its tokens.
        said: text, or messages as dicts, as the file has it.
        columns: what else the file has in its row.
    """

    ids: tuple[int, ...]
    said: str | list[dict[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chats(self) -> bool:
        """Whether it is of messages, so that its answer is one too."""
        return not isinstance(self.said, str)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run, and the seed of their order, which is another in each epoch."""

    prompts: Sequence[Prompt]
    seed: int

    def at(self, place: int) -> Prompt:
        """The prompt at a place of the endless order."""
        return self.prompts[cyclic_sample(place, len(self.prompts), self.seed)]

    @property
    def digest(self) -> str:
        """A digest of all prompts and their columns."""
        whole = hashlib.blake2b(digest_size=8)
        for prompt in self.prompts:
            whole.update(json.dumps([prompt.ids, prompt.said, prompt.columns], default=str).encode())
        return whole.hexdigest()


def read_prompts(config: Config, vocabulary: Vocabulary) -> Prompts:
    """Read the prompts of a run, and encode them.

    Raises:
        DataError: a file cannot be read, or a prompt is missing, empty, or too long beside an answer.
    """
    room = config.model.seq_length - config.policy.max_answer_tokens
    prompts = []
    template: Any = None
    for path in config.policy.prompts:
        for place, row in _rows(Path(path)):
            said = row.get("prompt")
            if isinstance(said, list) and said:
                template = template or _template(config, place)
                ids = _rendered(template, said, place)
            elif isinstance(said, str) and said:
                assert vocabulary.tokenizer is not None, "`policy_on` asks for a tokenizer"
                ids = vocabulary.tokenizer.encode(said)
            else:
                raise DataError(f"{place} must have a `prompt`, text or messages, but has {_short(said)}.")
            if not 0 < len(ids) <= room:
                raise DataError(
                    f"{place} must have a prompt of 1 to {room} tokens, `seq_length` less "
                    f"`max_answer_tokens`, but has {len(ids)}; leave it out, or make room."
                )
            prompts.append(Prompt(tuple(ids), said, {k: v for k, v in row.items() if k != "prompt"}))
    if not prompts:
        raise DataError(f"`prompts` must hold a prompt, but {', '.join(config.policy.prompts)} has none.")
    return Prompts(prompts, config.training.seed)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row of a file, and its place for messages."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]
        except ImportError as error:
            raise DataError(f"`pyarrow` must be installed to read {path}; pip install pyarrow.") from error
        try:
            rows = parquet.read_table(path).to_pylist()
        except (OSError, ArrowException) as error:
            raise DataError(f"`{path}` must be a Parquet file, but cannot be read ({error}).") from error
        yield from ((f"`{path}` row {number}", row) for number, row in enumerate(rows, 1))
        return
    try:
        lines = read_regular(path).decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` must be JSON lines in UTF-8, but cannot be read ({error}).") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"`{path}` line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} must be JSON, but is not ({error}).") from error
        if not isinstance(row, dict):
            raise DataError(f"{place} must be an object, but is {_short(row)}.")
        yield place, row


def _template(config: Config, place: str) -> Any:
    """A tokenizer of transformers with the chat template of the run's."""
    from megazero.data.conversations.answers import load_for_templates

    model = config.tokenizer.tokenizer_model
    if model is None or config.tokenizer.tokenizer_type != "HFTokenizer":
        raise DataError(
            f"{place} must be text, but is messages, which need a chat template; use `--tokenizer-type "
            "HFTokenizer`."
        )
    return load_for_templates(model)


def _rendered(template: Any, messages: list[dict[str, Any]], place: str) -> list[int]:
    """The tokens of messages and of the header that asks for an answer."""
    try:
        text = template.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = template(text, add_special_tokens=False)["input_ids"]
    except BaseException as error:
        if not is_failure(error):
            raise
        raise DataError(f"{place} must suit the chat template, but does not ({str(error)[:200]}).") from error
    return ids


def _short(value: object) -> str:
    return f"{value!r:.40}" if value is not None else "none"
