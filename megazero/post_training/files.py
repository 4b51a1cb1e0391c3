"""Reads conversations and pairs of answers: JSON lines (plain or compressed), Parquet or Arrow."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.tree.config import Config
from megazero.data.conversations.answers import ConversationEncoder
from megazero.data.preferences.pairs import Pairs, encode_pairs
from megazero.data_tools.conversations import lines_of


def encoder_of(config: Config) -> ConversationEncoder:
    """The encoder of conversations with the run's tokenizer and chat template.

    Raises:
        DataError: a file is missing or unsuitable, or transformers is not installed.
    """
    section, model = config.finetune, config.tokenizer.tokenizer_model
    assert model is not None, "a need of `task`"
    return ConversationEncoder(model, section.chat_template, allow_special=section.allow_special_tokens)


def read_pairs(paths: Sequence[str], encoder: ConversationEncoder, length: int) -> Pairs:
    """Read pairs of answers, see `encode_pairs`.

    Raises:
        DataError: a file cannot be read, a line is no pair, or no pair is left.
    """
    return encode_pairs(lines_of(paths, goes_on=False), encoder, length)
