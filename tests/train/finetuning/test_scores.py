"""Accuracy, F1 and the table of confusions, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megazero.train.finetuning.best import BestScore
from megazero.train.finetuning.scores import TaskReport, probabilities
from tests.tables import over_table

# labels a, a, a, b, c, unknown; answers a, a, b, b, a, c
TRUTH = np.array([0, 0, 0, 1, 2, -1])
SCORES = np.eye(3)[[0, 0, 1, 1, 0, 2]]


def test_numbers_are_those_worked_out_by_hand():
    report = TaskReport.of(("a", "b", "c"), TRUTH, SCORES)
    assert report.confusion.tolist() == [[2, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert (report.count, report.accuracy) == (5, 3 / 5)
    # precision and recall: a 2/3 and 2/3, b 1/2 and 1, c nothing
    assert report.f1 == pytest.approx((2 / 3, 2 / 3, 0.0))
    assert report.macro_f1 == pytest.approx(4 / 9)


def test_a_class_that_never_occurs_does_not_count_in_the_mean():
    report = TaskReport.of(("a", "b", "never"), np.array([0, 1]), np.eye(3)[[0, 1]])
    assert report.f1 == (1.0, 1.0, 0.0)
    assert report.macro_f1 == 1.0


def test_without_labels_there_is_nothing_to_say():
    report = TaskReport.of(("a", "b"), np.array([-1, -1]), np.zeros((2, 2)))
    assert (report.count, report.accuracy, report.macro_f1) == (0, None, None)


@over_table(
    ("truth", "answers", "only"),
    [
        ([0, 0, 1], [0, 0, 0], "a"),
        ([0, 0, 1], [2, 2, 2], "c"),
        ([0, 0, 1], [0, 0, 1], None),
        ([0, 0, 0], [0, 0, 0], None),  # there is one label alone: the answer is right
        ([-1, -1, -1], [0, 0, 0], None),
    ],
)
def test_a_model_that_knows_one_answer_is_found_out(truth, answers, only):
    assert TaskReport.of(("a", "b", "c"), np.array(truth), np.eye(3)[answers]).only_answer == only


@over_table(
    ("metric", "value", "other", "better"),
    [
        ("accuracy", 0.6, 0.5, True),
        ("accuracy", 0.5, 0.5, False),
        ("macro_f1", 0.4, 0.5, False),
        ("loss", 0.4, 0.5, True),
        ("loss", 0.5, 0.5, False),
        ("loss", math.nan, 0.5, False),
        ("loss", math.nan, None, False),
        ("loss", 9.0, None, True),
    ],
)
def test_a_loss_is_better_where_it_is_lower_and_equals_keep_the_earlier(metric, value, other, better):
    earlier = None if other is None else BestScore(3, metric, other)
    assert BestScore(6, metric, value).beats(earlier) is better


def test_of_equal_scores_the_first_wins():
    assert TaskReport.of(("a", "b"), np.array([0, 1]), np.zeros((2, 2))).confusion.tolist() == [
        [1, 0],
        [1, 0],
    ]


def test_the_table_is_legible():
    assert TaskReport.of(("a", "b", "c"), TRUTH, SCORES).table() == [
        "label  samples  precision  recall      F1",
        "a            3     0.6667  0.6667  0.6667",
        "b            1     0.5000  1.0000  0.6667",
        "c            1     0.0000  0.0000  0.0000",
        "true   predicted: a  b  c",
        "a                 2  1  0",
        "b                 0  1  0",
        "c                 1  0  0",
    ]


def test_many_classes_list_their_commonest_confusions():
    labels = [f"l{i}" for i in range(20)]
    truth = np.array([3, 3, 3, 5, 5, 7, 7])
    lines = TaskReport.of(labels, truth, np.eye(20)[[4, 4, 3, 6, 5, 8, 8]]).table()
    assert len(lines) == 22
    assert lines[-1] == "commonest confusions: l3 as l4: 2; l7 as l8: 2; l5 as l6: 1"


def test_probabilities_of_large_scores_are_finite():
    found = probabilities(np.array([[1000.0, 1000.0], [0.0, np.log(3.0)]], dtype=np.float32))
    assert found == pytest.approx(np.array([[0.5, 0.5], [0.25, 0.75]]))
