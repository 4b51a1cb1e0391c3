from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megazero.data.bert import sample
from megazero.data.bert.sample import SampleRecipe, SentenceStore, make_samples, sample_reference
from megazero.data.bert.sample_map import MapPlan, build_sample_map
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.native import NATIVE
from tests.data.bert.golden import CASES, WORDS, golden_corpus, items_digest, padding_differs
from tests.tables import over_table

RECIPE = SampleRecipe(WORDS, 16, 0.15, True)
SENTENCES = [[5, 6, 7], [9, 10], [12, 13, 15, 16], [18]]


def golden_batch(tmp_path, case):
    indexed = golden_corpus(tmp_path)
    least = 2 if case.binary_head else 1
    plan = MapPlan(case.num_samples, 1, case.sequence_length - 3, least, case.short_seq_prob, case.seed)
    rows = build_sample_map(indexed.lengths, np.array(indexed.document_index), plan).astype(np.int64)
    store = SentenceStore(indexed.tokens, indexed.lengths, indexed.offsets)
    recipe = SampleRecipe(WORDS, case.sequence_length, case.mask_prob, case.binary_head)
    return make_samples(store, rows, case.seed + np.arange(len(rows)), recipe)[0]


@over_table("native", [True, False])
@over_table("case", CASES)
def test_the_golden_samples(tmp_path, monkeypatch, case, native):
    if not native:
        monkeypatch.setattr(sample, "NATIVE", None)
    batch = golden_batch(tmp_path, case)
    assert items_digest(batch, WORDS.pad) == case.items_digest
    # The digests hold Megatron-Core's padding mask. It leaves out tokens that a replacement by [PAD] hides,
    # though they have labels; there are some in these samples, and here they are attended.
    assert padding_differs(batch, WORDS.pad).sum() == case.hidden


def test_one_golden_sample_in_full(tmp_path):
    batch = golden_batch(tmp_path, CASES[1])
    text = "2 35 7 14 21 28 35 7 15 22 29 36 8 3 21 14 4 4 4 21 28 35 7 14 21 28 35 7 14 21 28 3"
    assert batch["tokens"][12].tolist() == [int(token) for token in text.split()]
    assert batch["token_types"][12].tolist() == [0] * 14 + [1] * 18
    assert batch["labels"][12].tolist() == [-1] * 15 + [28, 35, 7, 14] + [-1] * 13
    assert batch["loss_mask"][12].tolist() == [0] * 15 + [1] * 4 + [0] * 13
    assert [batch[name][12] for name in ("lengths", "is_random", "truncated")] == [32, 1, 1]


def test_the_twins_agree_on_thousands_of_samples(tmp_path, monkeypatch):
    rng = np.random.default_rng(8)
    total = 0
    for case, dtype in enumerate(["uint16", "int32", "uint8", "int64"]):
        size = int(rng.choice([30, 120]))
        words = WordPieces(2, 3, 4, 0, rng.random(size) < 0.4, np.sort(rng.permutation(size)[: size - 3]))
        prefix = tmp_path / f"d{case}"
        with IndexedDatasetWriter(prefix, dtype) as writer:
            for _ in range(200):
                sizes = rng.integers(0, 30, rng.integers(0, 9))
                writer.add_document([rng.integers(0, size, n) for n in sizes])
            writer.add_document([rng.integers(0, size, 900)])
        indexed = open_indexed(prefix)
        length, least = int(rng.integers(5, 50)), 1 + case % 2
        plan = MapPlan(500, 1, length - 3, least, 0.3, case)
        rows = build_sample_map(indexed.lengths, np.array(indexed.document_index), plan).astype(np.int64)
        store = SentenceStore(indexed.tokens, indexed.lengths, indexed.offsets)
        recipe = SampleRecipe(words, length, float(rng.choice([0.15, 0.5])), least == 2)
        seeds = rng.integers(0, 1 << 32, len(rows))
        compiled, *compiled_range = make_samples(store, rows, seeds, recipe)
        with monkeypatch.context() as patch:
            patch.setattr(sample, "NATIVE", None)
            reference, *reference_range = make_samples(store, rows, seeds, recipe)
        assert compiled_range == reference_range
        for name, array in reference.items():
            assert compiled[name].dtype == array.dtype
            np.testing.assert_array_equal(compiled[name], array)
        total += len(rows)
    assert total > 2000


def test_segments_are_the_sentences_before_and_after_a_cut():
    whole = [token for sentence in SENTENCES for token in sentence]
    cuts, exchanged = set(), 0
    for seed in range(200):
        made = sample_reference(SENTENCES, 13, np.random.RandomState(seed), RECIPE)
        a, b = made.tokens[1 : made.begin_b - 1], made.tokens[made.begin_b : -1]
        assert (made.tokens[0], made.tokens[made.begin_b - 1], made.tokens[-1]) == (
            WORDS.cls,
            WORDS.sep,
            WORDS.sep,
        )
        assert (b + a if made.swapped else a + b) == whole
        assert not made.truncated
        cuts.add(len(b) if made.swapped else len(a))
        exchanged += made.swapped
    assert cuts == {3, 5, 9}
    assert 75 < exchanged < 125


def test_without_the_binary_head_there_is_one_segment():
    made = sample_reference(SENTENCES, 13, np.random.RandomState(3), replace(RECIPE, two_segments=False))
    assert made.tokens == [WORDS.cls, 5, 6, 7, 9, 10, 12, 13, 15, 16, 18, WORDS.sep]
    assert (made.begin_b, made.swapped) == (12, False)


def test_the_longer_segment_is_shortened_from_both_ends():
    first, second = list(range(5, 25)), list(range(25, 31))
    heads = set()
    for seed in range(60):
        made = sample_reference([first, second], 13, np.random.RandomState(seed), RECIPE)
        a, b = made.tokens[1 : made.begin_b - 1], made.tokens[made.begin_b : -1]
        long, short = (b, a) if made.swapped else (a, b)
        assert made.truncated
        # Down to equal lengths, where B gives the next one: whichever of the two that is.
        assert len(a) + len(b) == 13
        assert (len(a), len(b)) in ((7, 6), (6, 7))
        assert "".join(map(chr, long)) in "".join(map(chr, first))
        assert "".join(map(chr, short)) in "".join(map(chr, second))
        heads.add(long[0])
    assert len(heads) > 5


def test_empty_sentences_make_empty_segments():
    made = sample_reference([[5, 6], []], 13, np.random.RandomState(0), RECIPE)
    texts = {True: [WORDS.cls, WORDS.sep, 5, 6, WORDS.sep], False: [WORDS.cls, 5, 6, WORDS.sep]}
    assert made.tokens == texts[made.swapped]
    assert {
        sample_reference([[5, 6], []], 13, np.random.RandomState(seed), RECIPE).swapped for seed in range(9)
    } == {True, False}


@pytest.mark.skipif(NATIVE is None, reason="needs the compiled helpers")
@over_table("row", [[0, 5, 9], [-1, 2, 9], [2, 2, 9], [0, 1, 9], [0, 4, 14], [0, 4, 0]])
def test_the_compiled_maker_refuses_rows_that_do_not_fit(row):
    tokens = np.arange(5, 15, dtype=np.int64)
    store = SentenceStore(tokens, np.array([3, 2, 4, 1], np.int32), np.array([0, 24, 40, 72]))
    with pytest.raises(IndexError):
        make_samples(store, np.array([row]), np.array([0]), RECIPE)
