"""From labelled texts to token ids, in the form that each kind of pretrained model was trained on.

A bidirectional model reads ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]`` (Devlin et al. 2019). A causal
model reads ``A <eod>`` or ``A <eod> B <eod>``, where the last token attends to everything (Radford et al.
2018). If two texts are too long, the longer one is truncated first, until both fit. For multiple choice there
is a row for each choice: A is the question with the choice in place of ``_`` or appended, at most 128 tokens,
and B is the passage, truncated to fit (Lai et al. 2017; Shoeybi et al. 2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megazero.data.indexed.format import dtype_for_vocab
from megazero.data.labelled.dataset import UNKNOWN_LABEL, LabelledSamples
from megazero.data.labelled.files import LabelledFile, LabelledText
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError

MOST_OF_A_QUESTION = 128  # tokens
_CHUNK = 5000  # samples whose texts are encoded together


@dataclass(frozen=True)
class SampleEncoder:
    """Turns texts into rows of ids.

    Attributes:
        tokenizer: encodes the texts.
        length: the longest row, in ids.
        begin: ids before the first text.
        after: ids after each text.
    """

    tokenizer: Tokenizer
    length: int
    begin: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, length: int, *, causal: bool) -> SampleEncoder:
        """The encoder for a causal or a bidirectional model.

        Raises DataError if the vocabulary lacks a special token that the model needs, which is named.
        """
        if causal:
            if tokenizer.eod is None:
                raise DataError(
                    f"`tokenizer_type` must have a token that ends a document, but {tokenizer.name} has "
                    "none; take the pretrained model's tokenizer."
                )
            return cls(tokenizer, length, (), (tokenizer.eod,))
        missing = [role.upper() for role in ("cls", "sep") if role not in tokenizer.special_ids]
        if missing:
            raise DataError(
                f"`tokenizer_type` must have [{'] and ['.join(missing)}], but {tokenizer.name} does not; "
                "take the pretrained model's tokenizer."
            )
        return cls(tokenizer, length, (tokenizer.special_ids["cls"],), (tokenizer.special_ids["sep"],))

    def rows(self, sample: LabelledText, ids: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, int]]:
        """Yield each row of a sample, with the number of its ids that belong to the first text.

        Args:
            sample: the sample as text.
            ids: the ids of all its texts.
        """
        if not sample.choices:
            yield self._row([ids[text] for text in sample.texts], None)
            return
        for first in choice_texts(sample):
            yield self._row([ids[first], ids[sample.texts[0]]], MOST_OF_A_QUESTION)

    def _row(self, texts: Sequence[np.ndarray], most_of_first: int | None) -> tuple[np.ndarray, int]:
        room = self.length - len(self.begin) - len(texts) * len(self.after)
        kept: tuple[int, ...]
        if len(texts) == 1:
            kept = (min(len(texts[0]), room),)
        elif most_of_first is None:
            kept = longest_first(len(texts[0]), len(texts[1]), room)
        else:
            first = min(len(texts[0]), most_of_first, room)
            kept = first, min(len(texts[1]), room - first)
        ids = list(self.begin)
        for text, count in zip(texts, kept, strict=True):
            ids += [*text[:count].tolist(), *self.after]
        return np.array(ids, dtype=np.int64), len(self.begin) + kept[0] + len(self.after)


def longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """Shorten two lengths to a sum of at most `room`: always the longer one, and on ties the second."""
    if a + b <= room:
        return a, b
    half = room // 2
    if b <= half:
        return room - b, b
    if a <= room - half:
        return a, room - a
    return room - half, half


def choice_texts(sample: LabelledText) -> list[str]:
    """The first text of the row of each choice."""
    if len(sample.texts) == 1:
        return list(sample.choices)
    question = sample.texts[1]
    if "_" in question:
        return [question.replace("_", choice) for choice in sample.choices]
    return [f"{question} {choice}" for choice in sample.choices]


def encode_samples(
    files: Sequence[LabelledFile], labels: Sequence[str], encoder: SampleEncoder, *, choosing: bool
) -> LabelledSamples:
    """Encode the samples of some files.

    Args:
        files: the files.
        labels: all labels, in the order of their numbers.
        encoder: makes the rows.
        choosing: whether samples have choices, one for each label.

    Raises:
        DataError: a label is not in `labels`, or a sample has another number of choices than labels.
    """
    numbers = {label: number for number, label in enumerate(labels)}
    dtype = dtype_for_vocab(encoder.tokenizer.vocab_size)
    rows, firsts, targets = [], [], []
    for file in files:
        for start in range(0, len(file.samples), _CHUNK):
            chunk = file.samples[start : start + _CHUNK]
            ids = _ids_of(chunk, encoder.tokenizer)
            for sample in chunk:
                targets.append(_label_number(sample, numbers, file.path))
                if choosing and len(sample.choices) != len(labels):
                    raise DataError(
                        f"`choices` must be as many as the labels ({len(labels)}), but are "
                        f"{len(sample.choices)} in sample {sample.identity} of {file.path}; correct it."
                    )
                for row, first in encoder.rows(sample, ids):
                    rows.append(row.astype(dtype))
                    firsts.append(first)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return LabelledSamples(
        ids=np.concatenate(rows),
        offsets=offsets,
        firsts=np.array(firsts, dtype=np.int64),
        labels=np.array(targets, dtype=np.int64),
        choices=len(labels) if choosing else 1,
        length=encoder.length,
    )


def _ids_of(samples: Sequence[LabelledText], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The ids of all texts; a text that several rows share is encoded once."""
    texts: dict[str, None] = {}
    for sample in samples:
        own = [sample.texts[0], *choice_texts(sample)] if sample.choices else sample.texts
        texts |= dict.fromkeys(own)
    encoded = tokenizer.encode_batch(list(texts)).rows()
    return {text: row.astype(np.int64) for text, row in zip(texts, encoded, strict=True)}


def _label_number(sample: LabelledText, numbers: Mapping[str, int], path: str) -> int:
    if sample.label is None:
        return UNKNOWN_LABEL
    if sample.label not in numbers:
        raise DataError(
            f"`label` must be one of {', '.join(numbers)[:300]}, but is {sample.label[:40]!r} in sample "
            f"{sample.identity} of {path}; name all labels with --labels, or correct it."
        )
    return numbers[sample.label]
