"""Reads conversations and pairs of answers: JSON lines (plain or compressed), Parquet or Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megazero.config.tree.config import Config
from megazero.data.conversations.answers import ConversationEncoder
from megazero.data.preferences.dataset import PairSamples
from megazero.data.preferences.pairs import encode_pair, joined
from megazero.data_tools.conversations import lines_of, read_each
from megazero.errors import DataError
from megazero.post_training.task import Splits


def encoder_of(config: Config) -> ConversationEncoder:
    """The encoder of conversations with the run's tokenizer and chat template.

    Raises:
        DataError: a file is missing or unsuitable, or transformers is not installed.
    """
    section, model = config.finetune, config.tokenizer.tokenizer_model
    assert model is not None, "a need of `task`"
    return ConversationEncoder(model, section.chat_template, allow_special=section.allow_special_tokens)


def lines_in(paths: Sequence[str]) -> Iterator[tuple[str, bytes | int]]:
    """Each line's place and bytes, or the limit that it exceeds. Raises DataError if a file is missing."""
    for path in paths:
        if not Path(path).exists():
            raise DataError(
                f"`{path}` must be a file of conversations or pairs, but is missing; check the path"
            )
    return lines_of(paths, goes_on=False)


def read_splits(config: Config, *, compared: bool = False) -> tuple[Splits, list[PairSamples]]:
    """The pairs of answers of training and validation, and those of both in a list.

    Args:
        compared: whether samples have room for a reference's log-probabilities.

    Raises:
        DataError: a file cannot be read, a line is no pair, or a split has none that is usable.
    """
    section, encoder, length = config.finetune, encoder_of(config), config.model.seq_length
    paths = {"train_data": section.train_data if section.epochs else (), "valid_data": section.valid_data}
    read: dict[str, PairSamples] = {}
    remarks: list[str] = []
    for name, named in paths.items():
        if named:
            rows = read_each(lines_in(named), lambda line: encode_pair(line, encoder))
            pairs = joined(rows, encoder.vocab_size, length)
            scores = np.zeros((len(pairs), 2), np.float32) if compared else None
            read[name] = PairSamples(pairs, length, scores)
            remarks += [f"{name}: {remark}" for remark in (*pairs.remarks, f"{len(pairs):,} pairs")]
    splits = Splits(read.get("train_data"), read.get("valid_data"), tuple(remarks))
    return splits, [*read.values()]
