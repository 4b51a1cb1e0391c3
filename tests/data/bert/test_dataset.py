from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from megazero.data.bert import sample
from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import DataError
from tests.data.bert.golden import WORDS, golden_corpus
from tests.tables import over_table

SETTINGS = BERTSettings(sequence_length=32, words=WORDS)
ALL = range(40)


@pytest.fixture
def indexed(tmp_path):
    return golden_corpus(tmp_path)


def written(prefix, documents, dtype="uint16"):
    """A dataset of documents, given as lists of sentences, as lists of ids."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for sentences in documents:
            writer.add_document([np.array(ids, dtype=np.int64) for ids in sentences])
    return open_indexed(prefix)


def test_arrays_of_a_batch(indexed):
    dataset = BERTDataset(indexed, ALL, 100, SETTINGS)
    batch = dataset.batch([12, 0, 12])
    shapes = {name: (array.dtype.name, array.shape) for name, array in batch.items()}
    assert shapes == {
        "tokens": ("int64", (3, 32)),
        "token_types": ("int64", (3, 32)),
        "labels": ("int64", (3, 32)),
        "loss_mask": ("float32", (3, 32)),
        "lengths": ("int64", (3,)),
        "is_random": ("int64", (3,)),
        "truncated": ("int64", (3,)),
    }
    for name, array in batch.items():
        np.testing.assert_array_equal(array, np.stack([dataset[i][name] for i in (12, 0, 12)]))
        assert array.flags.c_contiguous
        assert array.flags.writeable
    assert dataset.batch([])["tokens"].shape == (0, 32)


@pytest.mark.parametrize("pad", [0, 1, 39])
def test_padding_is_where_the_text_has_ended(indexed, pad):
    dataset = BERTDataset(indexed, ALL, None, replace(SETTINGS, words=replace(WORDS, pad=pad)))
    batch = dataset.batch(range(len(dataset)))
    padding = np.arange(32) >= batch["lengths"][:, None]
    assert 0.1 < padding.mean() < 0.9
    assert set(batch["tokens"][padding].tolist()) == {pad}
    assert set(batch["token_types"][padding].tolist()) == {0}
    assert set(batch["labels"][padding].tolist()) == {-1}
    assert batch["loss_mask"][padding].max() == 0


def test_labels_are_where_the_loss_is(indexed):
    dataset = BERTDataset(indexed, ALL, None, SETTINGS)
    batch = dataset.batch(range(len(dataset)))
    masked = batch["loss_mask"] == 1
    assert batch["labels"][masked].min() >= 5
    assert set(batch["labels"][~masked].tolist()) == {-1}
    assert set(batch["loss_mask"].reshape(-1).tolist()) == {0.0, 1.0}


def test_documents_of_the_split_only(indexed):
    seen, settings = [], replace(SETTINGS, short_seq_prob=0.0)
    for documents in (range(30), range(30, 40)):
        dataset = BERTDataset(indexed, documents, None, settings)
        boundaries = indexed.document_index
        first, end = int(dataset.rows[:, 0].min()), int(dataset.rows[:, 1].max())
        assert boundaries[documents.start] <= first < end <= boundaries[documents.stop]
        seen.append(len(dataset))
    assert sum(seen) == len(BERTDataset(indexed, ALL, None, settings)) == 33


def test_epochs(indexed):
    lengths = [len(BERTDataset(indexed, ALL, None, SETTINGS, "train", epochs)) for epochs in (None, 1, 3)]
    assert lengths[0] == lengths[1] < lengths[2]
    asked = BERTDataset(indexed, ALL, 3 * lengths[0] - 20, SETTINGS)
    np.testing.assert_array_equal(asked.rows, BERTDataset(indexed, ALL, 5, SETTINGS, "train", 3).rows)


@pytest.mark.parametrize("seed", [0, 1234, (1 << 32) - 5, 1 << 40])
def test_seeds_of_any_size(indexed, monkeypatch, seed):
    dataset = BERTDataset(indexed, ALL, 60, replace(SETTINGS, seed=seed))
    compiled = dataset.batch(range(20))
    monkeypatch.setattr(sample, "NATIVE", None)
    for name, array in dataset.batch(range(20)).items():
        np.testing.assert_array_equal(array, compiled[name])


def test_a_sample_depends_on_its_number_and_the_seed(indexed):
    one = BERTDataset(indexed, ALL, 60, SETTINGS)
    np.testing.assert_array_equal(one[7]["tokens"], one.batch([3, 7])["tokens"][1])
    # The same sentences at another number are masked in another way.
    row = one.rows.copy()
    row[8] = row[7]
    one.rows = row
    assert one[7]["tokens"].tolist() != one[8]["tokens"].tolist()
    other = BERTDataset(indexed, ALL, 60, replace(SETTINGS, seed=5))
    assert one.batch(range(60))["tokens"].tolist() != other.batch(range(60))["tokens"].tolist()


@pytest.mark.parametrize("index", [-1, 100])
def test_numbers_past_the_end(indexed, index):
    dataset = BERTDataset(indexed, ALL, 100, SETTINGS)
    assert len(dataset) == 100
    with pytest.raises(IndexError, match=r"must be in 0\.\.99 of the train split of .*golden"):
        dataset[index]


def test_padding_share_is_that_of_the_batches(indexed):
    for head in (True, False):
        dataset = BERTDataset(indexed, ALL, 400, replace(SETTINGS, binary_head=head))
        lengths = dataset.batch(range(len(dataset)))["lengths"]
        assert dataset.padding_share == pytest.approx(1 - lengths.mean() / 32, abs=1e-12)


def test_what_is_said_at_the_start(indexed, tmp_path):
    dataset = BERTDataset(indexed, ALL, None, SETTINGS)
    out, padding = dataset.notes
    where = f"the train split of {tmp_path / 'golden'}"
    assert out == f"8 of the 40 documents of {where} are left out: 8 of one sentence."
    assert padding == f"{dataset.padding_share:.1%} of the positions of {where} are padding."
    assert len(BERTDataset(indexed, ALL, None, replace(SETTINGS, binary_head=False)).notes) == 1


def test_a_dataset_without_sentence_boundaries_is_refused(tmp_path):
    whole = written(tmp_path / "whole", [[[5, 6, 7, 8]]] * 20 + [[]])
    with pytest.raises(DataError) as caught:
        BERTDataset(whole, range(21), 1000, SETTINGS)
    assert str(caught.value) == (
        f"`documents` of {tmp_path / 'whole'} must be split into sentences, but each is one sequence; "
        "train with `--bert-no-binary-head`, or preprocess the text with `megazero data preprocess "
        "--split-sentences`."
    )
    alone = BERTDataset(whole, range(21), 1000, replace(SETTINGS, binary_head=False))
    assert len(alone) == 1000
    assert alone[0]["lengths"] == 6


def test_a_split_without_a_usable_document_says_why(tmp_path):
    documents = [[[5]] * 3, [[5]], [], [[6] * 513, [7]], [[8]]]
    dataset = written(tmp_path / "d", documents)
    with pytest.raises(DataError) as caught:
        BERTDataset(dataset, range(1, 5), 7, SETTINGS, "valid")
    assert str(caught.value) == (
        f"`valid` split of {tmp_path / 'd'} must have a document of at least 2 sentence(s), none of them "
        "longer than 512 tokens, but none of its 4 is: 1 empty, 2 of one sentence, 1 with a sentence of more "
        "than 512 tokens; give more text, or a larger share of it."
    )
    with pytest.raises(DataError, match=r"at least 1 sentence.* but none of its 1 is: 1 empty;"):
        BERTDataset(dataset, range(2, 3), 7, replace(SETTINGS, binary_head=False))


@over_table("native", [True, False])
@over_table("masked", [False, True])
def test_ids_beyond_the_vocabulary_are_named(tmp_path, monkeypatch, native, masked):
    if not native:
        monkeypatch.setattr(sample, "NATIVE", None)
    dataset = written(tmp_path / "d", [[[40, 40] if masked else [6, 40], [7, 8]]])
    settings = replace(SETTINGS, mask_prob=0.9 if masked else 0.01)
    with pytest.raises(
        DataError,
        match=r"must be in 0\.\.39, but is 40 in sample 0 of the train split of .*d; use the tokenizer",
    ):
        BERTDataset(dataset, range(1), None, settings)[0]
    large = WordPieces.numbered(41)
    assert BERTDataset(dataset, range(1), None, replace(settings, words=large))[0]["lengths"] == 7


def test_a_cached_map_gives_the_same_samples_and_follows_data_and_settings(tmp_path, indexed):
    settings = replace(SETTINGS, cache_dir=tmp_path / "cache")
    fresh = BERTDataset(indexed, ALL, 100, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached = BERTDataset(indexed, ALL, 100, settings)
    assert not cached.rows.flags.owndata
    np.testing.assert_array_equal(cached.batch(range(9))["tokens"], fresh.batch(range(9))["tokens"])
    # The map does not depend on how tokens are masked.
    BERTDataset(indexed, ALL, 100, replace(settings, mask_prob=0.3, words=WordPieces.numbered(40)))
    assert len(list((tmp_path / "cache").glob("*.json"))) == 1
    others = [
        {"sequence_length": 33},
        {"seed": 5},
        {"short_seq_prob": 0.2},
        {"binary_head": False},
    ]
    for number, change in enumerate(others, start=2):
        BERTDataset(indexed, ALL, 100, replace(settings, **change))
        assert len(list((tmp_path / "cache").glob("*.json"))) == number
    for number, arguments in enumerate([(range(39), 100), (ALL, 101), (ALL, None)], start=6):
        BERTDataset(indexed, *arguments, settings)
        assert len(list((tmp_path / "cache").glob("*.json"))) == number
    changed = written(tmp_path / "golden", [[[5, 6], [7]]] * 40)
    moved = BERTDataset(changed, ALL, 100, settings)
    np.testing.assert_array_equal(moved.rows, BERTDataset(changed, ALL, 100, SETTINGS).rows)


def test_the_description_holds_all_that_samples_depend_on(indexed):
    described = [
        BERTDataset(indexed, ALL, 100, replace(SETTINGS, **change)).description
        for change in (
            {},
            {"mask_prob": 0.2},
            {"words": WordPieces.numbered(40)},
            {"seed": 1},
            {"sequence_length": 16},
            {"short_seq_prob": 0.5},
            {"binary_head": False},
        )
    ]
    assert all(a != b for i, a in enumerate(described) for b in described[:i])
    assert described[0] == BERTDataset(indexed, ALL, 100, SETTINGS).description


@over_table(
    ("change", "message"),
    [
        ({"sequence_length": 4}, r"`seq_length` must be at least 5 for BERT, .*two \[SEP\].* but is 4"),
        ({"mask_prob": 0.0}, "`mask_prob` must lie between 0 and 1, but is 0.0"),
        ({"mask_prob": 1.0}, "`mask_prob` must lie between 0 and 1, but is 1.0"),
        ({"short_seq_prob": 1.1}, "`short_seq_prob` must be from 0 to 1, but is 1.1"),
        ({"short_seq_prob": -0.1}, "`short_seq_prob` must be from 0 to 1, but is -0.1"),
        ({"seed": -1}, "`seed` must not be negative, but is -1"),
    ],
)
def test_settings_that_cannot_be(change, message):
    with pytest.raises(DataError, match=message):
        replace(SETTINGS, **change)


def test_the_shortest_sequence(indexed):
    dataset = BERTDataset(indexed, ALL, None, replace(SETTINGS, sequence_length=5))
    batch = dataset.batch(range(len(dataset)))
    assert set(batch["lengths"].tolist()) == {5}
    assert set(batch["truncated"].tolist()) == {1}
