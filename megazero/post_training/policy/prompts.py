"""Prompts from files: their tokens, what reward functions see of them, and their order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megazero.config.tree.config import Config
from megazero.data.conversations.rows import BadRow, messages_of, read_object
from megazero.data.shuffle import cyclic_sample
from megazero.data.tokenizers.base import Tokenizer
from megazero.data_tools.conversations import lines_of, read_each
from megazero.errors import DataError
from megazero.serving.chat import ChatTemplate


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
    section = config.tokenizer
    chats = ChatTemplate(section.tokenizer_model or "")

    def read(line: bytes) -> Prompt:
        row = read_object(line)
        said = row.pop("prompt", None)
        if isinstance(said, str):
            ids = tokenizer.encode(said)
        else:
            said = messages_of("prompt", said)
            if section.tokenizer_type != "HFTokenizer":
                raise BadRow("messages need a tokenizer with a chat template: `--tokenizer-type HFTokenizer`")
            try:
                ids = chats.ids(said, variables={})
            except DataError as error:
                raise BadRow(str(error)) from error
        if not 0 < len(ids) <= room:
            raise BadRow(
                f"its prompt must have 1 to {room} tokens, `seq_length` less `max_answer_tokens`, but has "
                f"{len(ids)}"
            )
        return Prompt(tuple(ids), said, row)

    prompts = list(read_each(lines_of(config.policy.prompts, goes_on=False), read))
    if not prompts:
        raise DataError(f"`prompts` must hold a prompt, but {', '.join(config.policy.prompts)} holds none.")
    return Prompts(prompts, config.training.seed)
