"""Prompts from files: their tokens, what reward functions see of them, and their order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megazero.config.tree.config import Config
from megazero.data.conversations.answers import load_for_templates
from megazero.data.conversations.rows import BadRow, messages_of, read_object
from megazero.data.shuffle import cyclic_sample
from megazero.data.tokenizers.base import Tokenizer, is_failure
from megazero.data_tools.conversations import lines_of
from megazero.errors import DataError


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


def read_prompts(config: Config, tokenizer: Tokenizer) -> Prompts:
    """Read the prompts of a run, JSON lines, Parquet or Arrow, and encode them.

    Raises:
        DataError: a file cannot be read, or a prompt is missing, empty, or too long beside an answer.
    """
    room = config.model.seq_length - config.policy.max_answer_tokens
    prompts: list[Prompt] = []
    chats: Any = None
    for place, line in lines_of(config.policy.prompts, goes_on=False):
        try:
            if isinstance(line, int):
                raise BadRow(f"it has more than {line >> 20} MiB")
            if not line.strip():
                continue
            row = read_object(line)
            said = row.pop("prompt", None)
            if isinstance(said, str):
                ids = tokenizer.encode(said)
            else:
                said = messages_of("prompt", said)
                chats = chats or _templates(config)
                ids = _rendered(chats, said)
            if not 0 < len(ids) <= room:
                raise BadRow(
                    f"its prompt must have 1 to {room} tokens, `seq_length` less `max_answer_tokens`, "
                    f"but has {len(ids)}"
                )
        except BadRow as error:
            raise DataError(f"{place}: {error}; correct the line.") from error
        prompts.append(Prompt(tuple(ids), said, row))
    if not prompts:
        raise DataError(f"`prompts` must hold a prompt, but {', '.join(config.policy.prompts)} holds none.")
    return Prompts(prompts, config.training.seed)


def _templates(config: Config) -> Any:
    """A tokenizer of transformers with the chat template of the run's."""
    model = config.tokenizer.tokenizer_model
    if model is None or config.tokenizer.tokenizer_type != "HFTokenizer":
        raise BadRow("messages need a tokenizer with a chat template: `--tokenizer-type HFTokenizer`")
    return load_for_templates(model)


def _rendered(chats: Any, messages: list[dict[str, Any]]) -> list[int]:
    """The tokens of messages and of the header that asks for an answer."""
    try:
        text = chats.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = chats(text, add_special_tokens=False)["input_ids"]
    except BaseException as error:
        if not is_failure(error):
            raise
        raise BadRow(f"the chat template refuses it: {str(error)[:200]}") from error
    return ids
