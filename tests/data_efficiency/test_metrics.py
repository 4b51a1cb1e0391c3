from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest

from megazero.data_efficiency.metrics import (
    LengthThenRarity,
    RarityTable,
    Samples,
    SequenceLength,
    VocabularyCounts,
    VocabularyRarity,
    read_counts,
)
from megazero.errors import DataError
from tests.data_efficiency.row_files import write_rows
from tests.tables import over_table

FULL = Samples.of(
    np.array([4, 9]),
    {"tokens": np.array([[0, 1, 1], [2, 2, 0]]), "labels": np.array([[1, 1, 2], [2, 0, 0]])},
)
# Lengths 3 and 2, padded with 0; the second token of the first sample, a 1, is masked with 3.
PADDED = Samples.of(
    np.array([0, 1]),
    {
        "tokens": np.array([[2, 3, 2, 0], [1, 2, 0, 0]]),
        "labels": np.array([[-1, 1, -1, -1], [-1, -1, -1, -1]]),
        "loss_mask": np.array([[0, 1, 0, 0], [0, 0, 0, 0]], dtype=np.float32),
        "lengths": np.array([3, 2]),
    },
)
COUNTS = np.array([3, 4, 3, 0])  # the last never occurs, and counts as 1: shares 3/11, 4/11, 3/11, 1/11


def test_text_is_whole_and_unmasked():
    assert FULL.text.tolist() == [[0, 1, 1, 2], [2, 2, 0, 0]]
    assert FULL.padding_mask.tolist() == [[1] * 4] * 2
    assert PADDED.text.tolist() == [[2, 1, 2, 0], [1, 2, 0, 0]]
    assert PADDED.padding_mask.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert sorted(PADDED.as_dict()) == sorted(
        ["index", "labels", "lengths", "loss_mask", "padding_mask", "text", "tokens"]
    )


def test_lengths():
    assert SequenceLength().measure(PADDED).tolist() == [3, 2]
    assert SequenceLength().measure(FULL).tolist() == [4, 4]


def test_counts_leave_padding_out():
    assert VocabularyCounts(4).measure(FULL).tolist() == [3, 2, 3, 0]
    assert VocabularyCounts(4).measure(PADDED).tolist() == [0, 2, 3, 0]


def test_rarity_by_hand():
    three, four = -math.log(3 / 11), -math.log(4 / 11)
    table = RarityTable.of(COUNTS)
    np.testing.assert_allclose(table.nats, [three, four, three, -math.log(1 / 11)])
    np.testing.assert_allclose(table.sums(FULL), [2 * three + 2 * four, 4 * three])
    assert VocabularyRarity(table).measure(FULL).tolist() == [4, 5]  # 4.62 and 5.20, cut
    np.testing.assert_allclose(table.sums(PADDED), [2 * three + four, three + four])


def test_length_comes_before_rarity():
    """The largest rarity is 4 x 2.40 = 9.59, which is below 10^1, so a length counts 10^2."""
    metric = LengthThenRarity(RarityTable.of(COUNTS), 4)
    assert metric.coefficient == 100
    assert metric.measure(PADDED).tolist() == [303, 202]


@over_table(("tokens", "coefficient"), [(1, 100), (5, 1000), (42, 10_000)])
def test_the_coefficient_is_a_power_of_ten(tokens, coefficient):
    """log10 of 2.4 x 1, 5, 42 is 0.38, 1.08, 2.003."""
    assert LengthThenRarity(RarityTable.of(COUNTS), tokens).coefficient == coefficient


def test_a_vocabulary_of_one_word_has_no_rarity():
    metric = LengthThenRarity(RarityTable.of(np.array([5])), 4)
    assert metric.coefficient == 1


@pytest.mark.parametrize("wrong", [4, -1])
def test_an_id_that_was_not_counted_is_refused(wrong):
    arrays = {"tokens": np.array([[0, wrong]]), "labels": np.array([[0, 1]])}
    with pytest.raises(DataError, match="count every id of the dataset, but holds 4"):
        RarityTable.of(COUNTS).sums(Samples.of(np.arange(1), arrays))


def test_values_depend_on_the_table():
    table, other = RarityTable.of(COUNTS), RarityTable.of(COUNTS + 1)
    assert VocabularyRarity(table).identity != VocabularyRarity(other).identity
    copy = pickle.loads(pickle.dumps(VocabularyRarity(table)))
    assert copy.identity == VocabularyRarity(table).identity


@over_table("dtype", ["u1", "<u2", "<u4", "<u8", "<i8"])
def test_counts_of_any_type_are_read(tmp_path, dtype):
    assert read_counts(write_rows(tmp_path / "c", [[3, 4, 3, 0]], dtype)).tolist() == [3, 4, 3, 0]


@over_table(
    ("rows", "message"),
    [
        ([[1], [2]], "one row of counts, but holds 2"),
        ([[]], "but holds 1 row"),
        ([], "but holds 0 row"),
        ([[3, -1]], "span -1..3"),
        ([[0, 0]], "span 0..0"),
    ],
)
def test_what_cannot_be_counts_is_refused(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        read_counts(write_rows(tmp_path / "c", rows))


def test_counts_that_are_missing_or_cut_short_are_refused(tmp_path):
    with pytest.raises(DataError, match="c.idx` must be a readable file"):
        read_counts(tmp_path / "c")
    prefix = write_rows(tmp_path / "c", [[3, 4, 3, 0]])
    Path(prefix + ".bin").write_bytes(b"1234567")
    with pytest.raises(DataError, match="must be 32 bytes by the lengths of its index, but is 7"):
        read_counts(prefix)
