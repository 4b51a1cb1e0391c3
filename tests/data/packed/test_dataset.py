"""Packed samples: literal arrays, what they hold, their order over epochs, blends, caches and refusals."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import DocumentEnds, GPTSettings
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.packed.dataset import PackedDataset
from megazero.data.packed.packing import PackingFacts
from megazero.errors import DataError
from tests.data.corpora import write_golden, write_lengths
from tests.data.test_planted_cache import check, set_to

SETTINGS = GPTSettings(8, ends=DocumentEnds(59_999, reset_position_ids=True))
# Ids count up from 0 over the corpus: document 0 is 0..3, 1 is 4..14, 2 is 15..22, 4 is 23.
LENGTHS = [4, 11, 8, 0, 1]


@pytest.fixture
def indexed(tmp_path):
    return open_indexed(write_lengths(tmp_path / "c", LENGTHS))


def rows(dataset: PackedDataset) -> dict[int, dict[str, list]]:
    """The samples of an epoch by their first token."""
    batch = dataset.batch(range(len(dataset)))
    samples = [{key: array[i].tolist() for key, array in batch.items()} for i in range(len(dataset))]
    return {sample["tokens"][0]: sample for sample in samples}


def test_samples_drawn_by_hand(indexed):
    samples = rows(PackedDataset(indexed, range(1, 5), None, SETTINGS))
    assert samples == {
        4: {  # the first sequence of document 1, whose next token is known
            "tokens": [*range(4, 12)],
            "labels": [*range(5, 13)],
            "loss_mask": [1] * 8,
            "position_ids": [*range(8)],
            "document_ids": [0] * 8,
        },
        15: {
            "tokens": [*range(15, 23)],
            "labels": [*range(16, 23), 0],
            "loss_mask": [1] * 7 + [0],
            "position_ids": [*range(8)],
            "document_ids": [0] * 8,
        },
        12: {  # its rest, document 4, and padding
            "tokens": [12, 13, 14, 23, 0, 0, 0, 0],
            "labels": [13, 14, 0, 0, 0, 0, 0, 0],
            "loss_mask": [1, 1, 0, 0, 0, 0, 0, 0],
            "position_ids": [0, 1, 2, 0, 4, 5, 6, 7],
            "document_ids": [0, 0, 0, 1, -1, -1, -1, -1],
        },
    }


def test_positions_go_on_unless_they_are_reset(indexed):
    settings = replace(SETTINGS, ends=DocumentEnds(59_999))
    assert rows(PackedDataset(indexed, range(1, 5), None, settings))[12]["position_ids"] == [*range(8)]


def test_end_of_document_inputs_may_be_left_out_of_the_loss(indexed):
    """Other EODs than a document's last token, which has no label anyway."""
    plain = rows(PackedDataset(indexed, range(5), None, SETTINGS))[4]["loss_mask"]
    masked = replace(SETTINGS, ends=DocumentEnds(6, reset_position_ids=True, eod_mask_loss=True))
    assert rows(PackedDataset(indexed, range(5), None, masked))[4]["loss_mask"] == [1, 1, 0, 1, 1, 1, 1, 1]
    assert plain == [1] * 8


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_an_epoch_has_the_corpus_s_tokens_and_every_label_in_a_document(tmp_path, dtype):
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 90, 200)
    indexed = open_indexed(write_lengths(tmp_path / "c", lengths, dtype))
    dataset = PackedDataset(indexed, range(200), None, replace(SETTINGS, sequence_length=32))
    batch = dataset.batch(range(len(dataset)))
    real = batch["document_ids"] >= 0
    assert Counter(batch["tokens"][real].tolist()) == Counter(range(int(lengths.sum())))
    counted = batch["loss_mask"] == 1
    # Ids count up, so a label in the same document is its token plus one; first tokens are nobody's label.
    np.testing.assert_array_equal(batch["labels"][counted], batch["tokens"][counted] + 1)
    assert counted.sum() == sum(max(0, length - 1) for length in lengths.tolist())
    assert not (counted & ~real).any()
    assert dataset.padding_share == pytest.approx(1 - real.mean())


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own(tmp_path):
    """The order of an epoch does not depend on how many there are, so a longer training continues it."""
    indexed = open_indexed(write_lengths(tmp_path / "c", np.full(60, 5)))
    once = PackedDataset(indexed, range(60), None, SETTINGS)
    more = PackedDataset(indexed, range(60), 61, SETTINGS)
    assert (len(once), len(more)) == (60, 120)
    firsts = more.batch(range(120))["tokens"][:, 0].reshape(2, 60)
    assert sorted(firsts[0]) == sorted(firsts[1]) == sorted(5 * np.arange(60))
    assert (firsts[0] != firsts[1]).any()
    np.testing.assert_array_equal(once.batch(range(60))["tokens"][:, 0], firsts[0])
    assert len(PackedDataset(indexed, range(60), None, SETTINGS, epochs=3)) == 180


def test_batches_are_their_samples_and_what_comes_before_changes_nothing(indexed):
    dataset = PackedDataset(indexed, range(5), 9, SETTINGS)
    batch = dataset.batch([4, 0, 4])
    for key, array in batch.items():
        np.testing.assert_array_equal(array, np.stack([dataset[i][key] for i in (4, 0, 4)]))
        assert array.flags.c_contiguous
    assert {key: array.dtype.name for key, array in batch.items()} == {
        "tokens": "int64",
        "labels": "int64",
        "loss_mask": "float32",
        "position_ids": "int64",
        "document_ids": "int32",
    }
    with pytest.raises(IndexError, match=r"must be in 0..8"):
        dataset.batch([9])


def test_a_user_hears_the_cost(indexed):
    dataset = PackedDataset(indexed, range(1, 5), None, SETTINGS, name="valid")
    (note,) = [note for note in dataset.notes if "packed" in note]
    assert note == (
        f"the valid split of {indexed.prefix} is packed: 3 documents in 3 sequences of 8 tokens; 4 positions "
        "(16.67%) are padding, and 1 documents are longer than a sequence and are cut."
    )
    assert dataset.facts == PackingFacts(documents=3, cut=1, tokens=20, sequences=3, padding=4)


def test_whereabouts_lead_to_the_text(indexed):
    dataset = PackedDataset(indexed, range(1, 5), None, SETTINGS)
    places = {dataset.whereabouts(i) for i in range(3)}
    assert places == {
        f"{indexed.prefix}: sequences {documents}" for documents in ("1", "2", "1 from token 8, 4")
    }


def test_a_cache_serves_trainings_of_any_length(indexed, tmp_path):
    settings = replace(SETTINGS, cache_dir=tmp_path / "cache")
    first = PackedDataset(indexed, range(5), None, settings)
    entries = sorted((tmp_path / "cache").iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        longer = PackedDataset(indexed, range(5), 50, settings)
    assert sorted((tmp_path / "cache").iterdir()) == entries
    np.testing.assert_array_equal(longer.batch(range(3))["tokens"], first.batch(range(3))["tokens"])
    for other in (replace(settings, sequence_length=9), replace(settings, seed=5)):
        PackedDataset(indexed, range(5), None, other)
    assert len(list((tmp_path / "cache").glob("*.json"))) == 3


def test_a_document_may_be_chosen_twice(indexed, tmp_path):
    settings = replace(SETTINGS, cache_dir=tmp_path / "cache")
    first = PackedDataset(indexed, np.array([1, 4, 1]), None, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = PackedDataset(indexed, np.array([1, 4, 1]), None, settings)
    assert first.facts == again.facts == PackingFacts(documents=3, cut=2, tokens=23, sequences=3, padding=1)


def test_a_planted_cache_is_built_anew(indexed, tmp_path):
    def make(cache):
        return vars(PackedDataset(indexed, range(5), None, replace(SETTINGS, cache_dir=cache)).packing)

    check(make, tmp_path / "cache", set_to("offsets", 0, 5), "")


def test_a_blend_of_packed_datasets(tmp_path):
    one = str(write_lengths(tmp_path / "a", LENGTHS))
    two = str(write_lengths(tmp_path / "b", [6] * 9))
    request = DatasetRequest(
        GPTBuilder(SETTINGS, pack=True), (40, 0, 0), DataSources(("3", one, "1", two), "1,0,0")
    )
    train = build_datasets(request)[0]
    batch = train.batch(range(40))
    assert np.bincount(batch["dataset_id"]).tolist() == [30, 10]
    assert (batch["document_ids"][batch["dataset_id"] == 1] == [0] * 6 + [-1] * 2).all()
    assert len([note for note in train.notes if "is packed" in note]) == 2


def test_ids_beyond_the_vocabulary(indexed):
    with pytest.raises(DataError, match=r"must be in 0\.\.11, but is \d+ in sample"):
        PackedDataset(indexed, range(5), None, replace(SETTINGS, vocab_size=12)).batch(range(3))


def test_damaged_tokens_are_found(tmp_path):
    prefix = write_lengths(tmp_path / "c", LENGTHS)
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(9)
        file.write(b"\xff")
    dataset = PackedDataset(open_indexed(prefix, guarded=True), range(5), None, SETTINGS)
    with pytest.raises(DataError, match="damaged|checksum"):
        dataset.batch(range(len(dataset)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 0}, "`num_samples` must be at least 1"),
        ({"epochs": 0}, "`epochs` must be at least 1"),
        ({"sequence_ids": range(3, 4)}, "`tokens` must be at least 1 to be packed"),
    ],
)
def test_bad_input(indexed, change, words):
    given = {"sequence_ids": range(5), "num_samples": None, "epochs": None, **change}
    with pytest.raises(DataError, match=words):
        PackedDataset(indexed, settings=SETTINGS, **given)


def test_sentences_are_no_documents(tmp_path):
    with pytest.raises(DataError, match="5 sequences in 3 documents; preprocess the text without"):
        PackedDataset(open_indexed(write_golden(tmp_path / "g")), range(5), None, SETTINGS)


def test_an_empty_dataset(tmp_path):
    with IndexedDatasetWriter(tmp_path / "e", np.uint16):
        pass
    with pytest.raises(DataError, match="must be at least 1 to be packed"):
        PackedDataset(open_indexed(tmp_path / "e"), range(0), None, SETTINGS)
