"""Rows of ids, literally, for both kinds of models."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from megazero.data.labelled.encode import SampleEncoder, choice_texts, encode_samples, longest_first
from megazero.data.labelled.files import LabelledFile, LabelledText
from megazero.data.tokenizers.base import TokenBatch
from megazero.errors import DataError
from tests.tables import over_table

CLS, SEP, EOD = 90, 91, 92


class Numbers:
    """A tokenizer for texts that are numbers."""

    name, vocab_size, eod = "numbers", 100, EOD
    special_ids = MappingProxyType({"cls": CLS, "sep": SEP})

    def encode_batch(self, texts):
        return TokenBatch.of([[int(word) for word in text.split()] for text in texts])


def rows(*samples: LabelledText, length: int = 12, causal: bool = False, labels=("x", "y")):
    file = LabelledFile("f", samples, ())
    encoder = SampleEncoder.of(Numbers(), length, causal=causal)
    found = encode_samples([file], labels, encoder, choosing=bool(samples[0].choices))
    ids = np.split(found.ids, found.offsets[1:-1])
    return [row.tolist() for row in ids], found.firsts.tolist(), found


def text(*texts: str, label: str | None = "x", choices: tuple[str, ...] = ()) -> LabelledText:
    return LabelledText("0", texts, choices, label)


@over_table(
    ("causal", "texts", "ids", "first"),
    [
        (False, ("1 2",), [CLS, 1, 2, SEP], 4),
        (False, ("1 2", "3"), [CLS, 1, 2, SEP, 3, SEP], 4),
        (False, ("", "3"), [CLS, SEP, 3, SEP], 2),
        (True, ("1 2",), [1, 2, EOD], 3),
        (True, ("1 2", "3"), [1, 2, EOD, 3, EOD], 3),
        (False, ("1 2 3 4 5 6 7 8 9",), [CLS, 1, 2, 3, 4, 5, 6, SEP], 8),
        (False, ("1 2 3 4 5 6", "7 8 9"), [CLS, 1, 2, 3, SEP, 7, 8, SEP], 5),
        (True, ("1 2 3 4 5", "6 7 8 9"), [1, 2, 3, EOD, 6, 7, 8, EOD], 4),
        (False, ("1", "2 3 4 5 6 7"), [CLS, 1, SEP, 2, 3, 4, 5, SEP], 3),
    ],
)
def test_texts_become_rows(causal, texts, ids, first):
    assert rows(text(*texts), length=8, causal=causal)[:2] == ([ids], [first])


def test_the_longer_of_two_shrinks_first_as_if_token_by_token():
    for a in range(9):
        for b in range(9):
            for room in range(12):
                left_a, left_b = a, b
                while left_a + left_b > room:
                    left_a, left_b = (left_a - 1, left_b) if left_a > left_b else (left_a, left_b - 1)
                assert longest_first(a, b, room) == (left_a, left_b), (a, b, room)


def test_a_choice_stands_in_the_blank_or_behind_the_question():
    assert choice_texts(text("p", "a _ b", choices=("1", "2"))) == ["a 1 b", "a 2 b"]
    assert choice_texts(text("p", "why", choices=("1", "2"))) == ["why 1", "why 2"]
    assert choice_texts(text("p", choices=("1", "2"))) == ["1", "2"]


def test_multiple_choice_has_a_row_for_each_choice_with_the_passage_cut_at_its_end():
    sample = text("50 51 52 53 54 55", "1 _ 2", label="y", choices=("7", "8"))
    ids, firsts, found = rows(sample)
    assert ids == [
        [CLS, 1, 7, 2, SEP, 50, 51, 52, 53, 54, 55, SEP],
        [CLS, 1, 8, 2, SEP, 50, 51, 52, 53, 54, 55, SEP],
    ]
    assert (firsts, found.labels.tolist(), found.choices) == ([5, 5], [1], 2)
    ids, firsts, _ = rows(sample, length=9)
    assert ids[0] == [CLS, 1, 7, 2, SEP, 50, 51, 52, SEP]


def test_a_question_has_at_most_128_tokens():
    ids, firsts, _ = rows(text("50 51", "1 " * 200 + "_", choices=("7", "8")), length=200)
    assert (firsts[0], len(ids[0])) == (130, 133)
    assert ids[0] == [CLS, *[1] * 128, SEP, 50, 51, SEP]


def test_labels_and_choices_that_do_not_fit_get_a_sentence():
    with pytest.raises(DataError, match="`label` must be one of x, y, but is 'z' in sample 0 of f"):
        rows(text("1", label="z"))
    with pytest.raises(DataError, match=r"must be as many as the labels \(2\), but are 1 in sample 0 of f"):
        rows(text("1", choices=("2",)))


@over_table(
    ("causal", "changes", "says"),
    [
        (False, {"special_ids": {"cls": 1}}, r"must have \[SEP\], but n does not"),
        (False, {"special_ids": {}}, r"must have \[CLS\] and \[SEP\]"),
        (True, {"eod": None}, "must have a token that ends a document"),
    ],
)
def test_a_vocabulary_without_the_marks_is_refused(causal, changes, says):
    tokenizer = SimpleNamespace(**{"name": "n", "eod": 1, "special_ids": {"cls": 1, "sep": 2}, **changes})
    with pytest.raises(DataError, match=says):
        SampleEncoder.of(tokenizer, 8, causal=causal)
