from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from megazero.data.bert.sample_map import (
    DocumentCounts,
    MapPlan,
    build_sample_map,
    count_documents,
    sample_map_reference,
)
from megazero.data.native import NATIVE
from megazero.errors import DataError
from tests.data.bert.golden import CASES, golden_corpus
from tests.tables import over_table

PLAN = MapPlan(None, 1, target=10, min_sentences=2, short_seq_prob=0.0, seed=1234)
both = pytest.mark.parametrize("build", [build_sample_map, sample_map_reference])


def mapped(build, documents: list[list[int]], plan: MapPlan) -> list[list[int]]:
    """The rows of documents given as the lengths of their sentences, in the order of the text."""
    return sorted(build(*laid_out(documents), plan).tolist())


def laid_out(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([length for document in documents for length in document], dtype=np.int32)
    return lengths, np.cumsum([0, *map(len, documents)])


@both
@pytest.mark.parametrize("case", CASES)
def test_the_golden_maps(tmp_path, build, case):
    indexed = golden_corpus(tmp_path)
    target, least = case.sequence_length - 3, 2 if case.binary_head else 1
    plan = MapPlan(case.num_samples, 1, target, least, case.short_seq_prob, case.seed)
    rows = build(indexed.lengths, np.array(indexed.document_index), plan)
    assert rows.shape == (case.rows, 3)
    assert rows.dtype == np.uint32
    assert hashlib.md5(rows.astype("<u4").tobytes()).hexdigest() == case.map_digest
    if case.rows == 100:
        assert rows[:3].tolist() == [[76, 78, 29], [6, 10, 29], [21, 25, 29]]


@both
def test_sentences_are_packed_up_to_the_target(build):
    # Five and seven reach it; the nine goes along, as it would be left alone; the same at the target exactly.
    assert mapped(build, [[5, 7, 9], [4, 6, 1, 1]], PLAN) == [[0, 3, 10], [3, 5, 10], [5, 7, 10]]
    # One sentence reaches it, but two are needed.
    assert mapped(build, [[30, 2, 3, 4]], PLAN) == [[0, 2, 10], [2, 4, 10]]
    single = replace(PLAN, min_sentences=1)
    assert mapped(build, [[30, 2, 3, 4]], single) == [[0, 1, 10], [1, 4, 10]]
    assert mapped(build, [[30], [], [2]], single) == [[0, 1, 10], [1, 2, 10]]


@both
def test_what_is_left_out(build):
    documents = [[3, 3], [4], [], [513, 2, 2], [512, 2], [513]]
    assert mapped(build, documents, PLAN) == [[0, 2, 10], [6, 8, 10]]
    # A lone sentence may be of any length.
    expected = [[0, 2, 10], [2, 3, 10], [6, 8, 10], [8, 9, 10]]
    assert mapped(build, documents, replace(PLAN, min_sentences=1)) == expected


@pytest.mark.parametrize(("least", "counts"), [(2, (2, 2, 2, 1)), (1, (4, 2, 0, 1))])
def test_documents_are_counted_by_what_becomes_of_them(least, counts):
    lengths, boundaries = laid_out([[3, 3], [4], [], [513, 2, 514], [512, 2], [513], []])
    assert count_documents(lengths, boundaries, least) == DocumentCounts(*counts)
    # Those of a split in the middle: [4], [], [513, 2, 514].
    part = DocumentCounts(0, 1, 1, 1) if least == 2 else DocumentCounts(1, 1, 0, 1)
    assert count_documents(lengths, boundaries[1:5], least) == part


def test_counts_agree_with_the_map():
    rng = np.random.default_rng(3)
    for least in (1, 2):
        lengths, boundaries = random_documents(rng, 400)
        rows = build_sample_map(lengths, boundaries, replace(PLAN, min_sentences=least))
        used = np.unique(np.searchsorted(boundaries, rows[:, 0], side="right"))
        counts = count_documents(lengths, boundaries, least)
        assert counts.used == used.size
        assert counts.used + counts.left_out == 400


def test_the_reasons_in_words():
    counts = DocumentCounts(10, 3, 0, 2)
    assert counts.left_out == 5
    assert counts.reasons == "3 empty, 2 with a sentence of more than 512 tokens"


@both
def test_an_epoch_holds_each_sentence_of_usable_documents_once(build):
    rng = np.random.default_rng(5)
    lengths, boundaries = random_documents(rng, 200)
    once = build(lengths, boundaries, PLAN)
    covered = np.concatenate([np.arange(first, end) for first, end, _ in once.tolist()])
    assert np.unique(covered).size == covered.size
    sentences = np.diff(boundaries)
    kept = [
        number
        for number, count in enumerate(sentences)
        if count > 1 and lengths[boundaries[number] : boundaries[number + 1]].max() <= 512
    ]
    assert covered.size == sum(sentences[kept])
    # Three epochs, shuffled together: each row thrice, and not one epoch after the other.
    thrice = build(lengths, boundaries, replace(PLAN, epochs=3))
    assert sorted(thrice.tolist()) == sorted(3 * once.tolist())
    assert len(np.unique(thrice[: len(once)], axis=0)) < len(once)


@both
def test_epochs_are_whole(build):
    """As many as it takes, so that there may be more samples than asked for."""
    documents = [[5, 5], [5, 5], [5, 5]]
    for asked, given in ((1, 3), (3, 3), (4, 6), (7, 9)):
        assert len(build(*laid_out(documents), replace(PLAN, num_samples=asked))) == given


def test_the_twins_agree():
    rng = np.random.default_rng(6)
    for case in range(60):
        lengths, boundaries = random_documents(rng, 80)
        plan = MapPlan(
            num_samples=int(rng.integers(1, 400)) if case % 2 else None,
            epochs=int(rng.integers(1, 4)),
            target=int(rng.integers(2, 120)),
            min_sentences=int(rng.integers(1, 3)),
            short_seq_prob=float(rng.choice([0.0, 1e-300, 0.1, 0.4, 1.0])),
            seed=int(rng.choice([0, 1, 1234, (1 << 31) - 1, 1 << 33])),
        )
        rows = build_sample_map(lengths, boundaries, plan)
        np.testing.assert_array_equal(rows, sample_map_reference(lengths, boundaries, plan))


def random_documents(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = [rng.integers(0, 40, rng.integers(0, 9)) for _ in range(count)]
    lengths = np.concatenate(sizes).astype(np.int32)
    lengths[rng.integers(0, lengths.size, 6)] = 600
    return lengths, np.cumsum([0, *(size.size for size in sizes)])


def test_short_targets_come_as_often_as_asked():
    lengths, boundaries = laid_out([[1, 1]] * 30_000)
    targets = build_sample_map(lengths, boundaries, replace(PLAN, target=50, short_seq_prob=0.1))[:, 2]
    short = targets[targets < 50]
    assert abs(short.size / 30_000 - 0.1 * 48 / 49) < 0.006  # one short target in 49 is the full one
    assert (short.min(), short.max()) == (2, 49)
    assert abs(short.mean() - 25.5) < 1


@over_table(("prob", "ratio"), [(0, 0), (0.1, 10), (0.4, 3), (0.66, 2), (0.7, 1), (1, 1), (5e-324, 1 << 32)])
def test_the_ratio_is_rounded_half_away_from_zero(prob, ratio):
    assert replace(PLAN, short_seq_prob=prob).short_ratio == ratio


@pytest.mark.parametrize("field", ["num_samples", "epochs"])
def test_counts_must_be_positive(field):
    with pytest.raises(DataError, match=f"`{field}` must be at least 1, but is 0"):
        replace(PLAN, **{field: 0})


@pytest.mark.skipif(NATIVE is None, reason="needs the compiled helpers")
def test_the_compiled_map_refuses_what_would_lead_outside():
    lengths = np.array([3, 3], dtype=np.int32)
    for wrong in ([0, 3], [2, 0], [-1, 2]):
        with pytest.raises(IndexError):
            build_sample_map(lengths, np.array(wrong), PLAN)
    with pytest.raises(ValueError, match="no document is usable"):
        build_sample_map(lengths, np.array([0, 1, 2]), replace(PLAN, num_samples=5))
