"""Pairs of answers as tokens: the one that was chosen, and the one that was rejected.

A row is `{"chosen", "rejected"}`, both of messages or both of plain text, maybe with the `prompt` before both
and a `margin`, as in TRL. Without a prompt, what both have in common at the beginning is the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megazero.data.conversations.answers import ConversationEncoder
from megazero.data.conversations.rows import (
    BadRow,
    Conversation,
    messages_of,
    read_object,
    variables_of,
)
from megazero.data.indexed.format import dtype_for_vocab
from megazero.errors import DataError


@dataclass(frozen=True)
class Pairs:
    """`n` pairs of answers in memory; row 2i is the chosen answer of pair i, row 2i + 1 the rejected one.

    Attributes:
        ids: the token ids of all rows, prompt and answer, concatenated.
        offsets: int64 [2n + 1], where each row begins in `ids`.
        answers: int64 [2n], where the answer begins in its row; it lasts until the row's end.
        margins: float32 [n], by how much the chosen answer is better; 0 if unknown.
        remarks: sentences about pairs that were left out or shortened.
    """

    ids: np.ndarray
    offsets: np.ndarray
    answers: np.ndarray
    margins: np.ndarray
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.margins)


EncodedPair = tuple[Sequence[tuple[np.ndarray, int]], float]
"""Tokens of the chosen row and of the rejected one, and where the answer begins in each; the margin."""


def encode_pair(line: bytes, encoder: ConversationEncoder) -> EncodedPair:
    """The pair of a line of JSON as tokens, up to the end of each answer. Raises BadRow."""
    *pair, margin = read_pair(line)
    return [_answered(*encoder.encode(conversation)) for conversation in pair], margin


def joined(pairs: Iterable[EncodedPair], vocab_size: int, length: int) -> Pairs:
    """Put pairs together; longer ones lose tokens at the left of their prompt, as many in both rows.

    Pairs whose answers do not fit into `length` tokens, or are the same, are left out. Raises DataError if
    none is left.
    """
    rows: list[np.ndarray] = []
    answers: list[int] = []
    margins: list[float] = []
    shortened = too_long = same = 0
    for encoded, margin in pairs:
        cut = max(0, max(len(ids) for ids, _ in encoded) - length)
        if np.array_equal(encoded[0][0], encoded[1][0]):
            same += 1
        elif cut >= min(begin for _, begin in encoded):  # the first token of an answer follows another
            too_long += 1
        else:
            shortened += cut > 0
            rows += [ids[cut:].astype(dtype_for_vocab(vocab_size)) for ids, _ in encoded]
            answers += [begin - cut for _, begin in encoded]
            margins.append(margin)
    if not margins:
        why = (
            f"{too_long} do not and {same} have the same answer twice" if too_long + same else "there is none"
        )
        raise DataError(
            f"`train_data` and `valid_data` must hold pairs whose answers fit into {length} tokens, but in "
            f"one {why}; check the files."
        )
    counts = (
        (shortened, f"pairs are longer than {length} tokens, and their prompts are cut at the left"),
        (too_long, f"pairs are left out, as their answers do not fit into {length} tokens"),
        (same, "pairs are left out, as both answers are the same"),
    )
    return Pairs(
        np.concatenate(rows),
        np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        np.array(answers, dtype=np.int64),
        np.array(margins, dtype=np.float32),
        tuple(f"{count:,} {what}" for count, what in counts if count),
    )


def _answered(ids: np.ndarray, counted: np.ndarray) -> tuple[np.ndarray, int]:
    """A row's tokens up to the end of its answer, and where that begins."""
    places = np.flatnonzero(counted)
    if not places.size:
        raise BadRow("it must hold two answers of the assistant, but one counts no token")
    begin, end = int(places[0]), int(places[-1]) + 1
    if end - begin != places.size:
        raise BadRow("each of its answers must be one message of the assistant, but one is more")
    return ids[:end], begin


def read_pair(line: bytes) -> tuple[Conversation, Conversation, float]:
    """The chosen and the rejected conversation of a line of JSON, and the margin. Raises BadRow."""
    row = read_object(line)
    if "chosen" not in row or "rejected" not in row:
        raise BadRow(
            f"it must have the keys `chosen` and `rejected`, but its keys are: {', '.join(list(row)[:5])}"
        )
    margin = row.get("margin") or 0.0
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not np.isfinite(margin):
        raise BadRow(f"`margin` must be a number, but is {margin!r:.40}")
    prompt, answers = row.get("prompt"), (row["chosen"], row["rejected"])
    if all(isinstance(answer, str) for answer in answers) and isinstance(prompt, (str, type(None))):
        before = answers[0][: _common(*answers)].removesuffix(" ") if prompt is None else prompt
        start = len(before) if prompt is None else 0
        chosen, rejected = (Conversation([], texts=(before, answer[start:])) for answer in answers)
        return chosen, rejected, float(margin)
    lead = [] if prompt is None else messages_of("prompt", prompt)
    turns = [
        [*lead, *messages_of(key, answer)]
        for key, answer in zip(("chosen", "rejected"), answers, strict=True)
    ]
    given = len(lead) if prompt is not None else _common(*turns)
    chosen, rejected = (Conversation(own, given, variables_of(row)) for own in turns)
    return chosen, rejected, float(margin)


def _common(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """The number of messages or characters with which both begin, before the last."""
    most = max(0, min(len(chosen), len(rejected)) - 1)
    return next((i for i in range(most) if chosen[i] != rejected[i]), most)
