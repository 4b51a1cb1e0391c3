from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from megazero.data import gpt_dataset
from megazero.data.gpt_dataset import DocumentEnds, GPTDataset, GPTSettings, finish_batch
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.mock import MockGPTDataset
from megazero.errors import DataError
from tests.data.corpora import write_golden, write_lengths
from tests.tables import over_table

# The golden lengths 5,3,7,2,1 with ids counting up: sequence s begins with id 0, 5, 8, 15, 17.
LENGTHS = [5, 3, 7, 2, 1]
STREAM_8_1234 = [  # documents 2,2,4,1,0,3,4,0,1,3 end to end
    *range(8, 15), *range(8, 15), 17, *range(5, 8), *range(5),
    *range(15, 17), 17, *range(5), *range(5, 8), *range(15, 17),
]  # fmt: skip


@pytest.fixture
def indexed(tmp_path):
    return open_indexed(write_lengths(tmp_path / "c", LENGTHS))


def test_golden_samples(indexed):
    dataset = GPTDataset(indexed, range(5), 8, GPTSettings(sequence_length=4, seed=1234))
    assert len(dataset) == 8
    for i, sample in enumerate([7, 5, 6, 0, 4, 3, 2, 1]):
        item = dataset[i]
        assert item["tokens"].tolist() == STREAM_8_1234[4 * sample : 4 * sample + 4]
        assert item["labels"].tolist() == STREAM_8_1234[4 * sample + 1 : 4 * sample + 5]
        assert item["loss_mask"].tolist() == [1, 1, 1, 1]
        assert item["position_ids"].tolist() == [0, 1, 2, 3]
    types = {key: array.dtype.name for key, array in item.items()}
    assert types == {"tokens": "int64", "labels": "int64", "loss_mask": "float32", "position_ids": "int64"}


def test_whereabouts_lead_to_the_text(indexed):
    """Sample 7 of the order above comes first: tokens 28 to 32 of the stream, in documents 0 and 1."""
    dataset = GPTDataset(indexed, range(5), 8, GPTSettings(sequence_length=4, seed=1234))
    assert dataset.whereabouts(0) == f"{indexed.prefix}: sequence 0, token 2, to sequence 1, token 1"
    assert dataset.whereabouts(3) == f"{indexed.prefix}: sequence 2, token 0, to sequence 2, token 4"


def test_batch_stacks_items(indexed):
    dataset = GPTDataset(indexed, range(5), 8, GPTSettings(sequence_length=4))
    batch = dataset.batch(np.array([3, 0, 3]))
    for key, array in batch.items():
        np.testing.assert_array_equal(array, np.stack([dataset[i][key] for i in (3, 0, 3)]))
        assert array.flags.c_contiguous
        assert array.flags.writeable


@over_table("dtype", ["uint8", "int8", "uint16", "int16", "int32", "int64"])
@over_table("extra", [True, False])
def test_compiled_gather_equals_its_reference(tmp_path, monkeypatch, dtype, extra):
    rng = np.random.default_rng(4)
    with IndexedDatasetWriter(tmp_path / "r", dtype) as writer:
        for length in rng.integers(0, 30, 40):
            writer.add_document([rng.integers(0, 128, length)])
    settings = GPTSettings(sequence_length=11, add_extra_token=extra)
    dataset = GPTDataset(open_indexed(tmp_path / "r"), range(40), 120, settings)
    indices = rng.permutation(len(dataset))
    compiled = dataset.batch(indices)
    monkeypatch.setattr(gpt_dataset, "NATIVE", None)
    for key, array in dataset.batch(indices).items():
        np.testing.assert_array_equal(array, compiled[key])


def test_one_epoch_holds_every_token_once(tmp_path):
    rng = np.random.default_rng(5)
    prefix = write_lengths(tmp_path / "r", rng.integers(0, 50, 100))
    indexed = open_indexed(prefix)
    settings = GPTSettings(sequence_length=16, add_extra_token=False)
    dataset = GPTDataset(indexed, range(100), None, settings)
    batch = dataset.batch(np.arange(len(dataset)))
    seen = np.sort(batch["tokens"].reshape(-1))
    assert seen.size == indexed.total_tokens // 16 * 16
    assert np.unique(seen).size == seen.size
    assert set(batch["loss_mask"][:, -1].tolist()) == {0.0}
    assert set(batch["labels"][:, -1].tolist()) == {0}


def test_ids_of_the_split_only(indexed):
    part = GPTDataset(indexed, np.array([1, 2]), None, GPTSettings(sequence_length=3))
    seen = set(part.batch(np.arange(len(part)))["tokens"].reshape(-1).tolist())
    assert seen <= set(range(5, 15))
    same = GPTDataset(indexed, range(1, 3), None, GPTSettings(sequence_length=3))
    np.testing.assert_array_equal(same[1]["tokens"], part[1]["tokens"])


def test_masks_at_end_of_document():
    tokens = np.array([[5, 0, 6, 7, 0, 0, 8], [0, 1, 2, 3, 4, 5, 0]])
    every = DocumentEnds(0, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)

    def finished(**changes: bool) -> dict[str, np.ndarray]:
        return finish_batch(tokens, tokens, GPTSettings(7, ends=replace(every, **changes)))

    batch = finished()
    assert batch["loss_mask"].tolist() == [[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert batch["document_ids"].dtype == np.int32
    only = finished(reset_position_ids=False, eod_mask_loss=False)
    assert only["position_ids"].tolist() == [list(range(7))] * 2
    assert only["loss_mask"].min() == 1
    assert "document_ids" not in finished(reset_attention_mask=False)


@over_table("flag", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_masks_need_the_token(flag):
    with pytest.raises(DataError, match=f"`eod_token` must be given for {flag}"):
        DocumentEnds(**{flag: True})


def test_too_little_text_shows_dataset_and_arithmetic(tmp_path):
    indexed = open_indexed(write_golden(tmp_path / "g"))
    with pytest.raises(DataError) as caught:
        GPTDataset(indexed, range(5), None, GPTSettings(sequence_length=12), name="valid")
    text = str(caught.value)
    assert text.startswith(f"valid split of {tmp_path / 'g'} (5 sequences)")
    assert "sequence_length + 1 = 13 for one sample, but are 12 " in text
    assert len(GPTDataset(indexed, range(5), None, GPTSettings(sequence_length=11))) == 1
    with pytest.raises(DataError, match="0 sequences"):
        GPTDataset(indexed, range(0), 3, GPTSettings(sequence_length=2))


@pytest.mark.parametrize("native", [True, False])
def test_ids_beyond_the_vocabulary_are_named(tmp_path, monkeypatch, native):
    if not native:
        monkeypatch.setattr(gpt_dataset, "NATIVE", None)
    indexed = open_indexed(write_golden(tmp_path / "g"))
    dataset = GPTDataset(indexed, range(5), None, GPTSettings(sequence_length=11, vocab_size=37))
    with pytest.raises(
        DataError, match=r"must be in 0\.\.36, but is 37 in sample 0 of the train split of .*g;"
    ):
        dataset[0]
    assert GPTDataset(indexed, range(5), None, GPTSettings(11, vocab_size=38))[0]["tokens"].size == 11


@pytest.mark.parametrize("index", [-1, 8])
def test_numbers_past_the_end(indexed, index):
    dataset = GPTDataset(indexed, range(5), 8, GPTSettings(sequence_length=4))
    with pytest.raises(IndexError):
        dataset[index]


def test_an_empty_batch(indexed):
    dataset = GPTDataset(indexed, range(5), 8, GPTSettings(sequence_length=4, vocab_size=5))
    assert dataset.batch([])["tokens"].shape == (0, 4)


def test_cached_index_gives_the_same_samples_and_follows_the_data(tmp_path):
    settings = GPTSettings(sequence_length=4, cache_dir=tmp_path / "cache")
    prefix = write_lengths(tmp_path / "c", LENGTHS)
    fresh = GPTDataset(open_indexed(prefix), range(5), 8, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached = GPTDataset(open_indexed(prefix), range(5), 8, settings)
    assert not cached.index.document_index.flags.owndata
    np.testing.assert_array_equal(cached.batch(range(8))["tokens"], fresh.batch(range(8))["tokens"])
    write_lengths(tmp_path / "c", [1, 2, 7, 3, 5])  # as many tokens and sequences as before
    moved = GPTDataset(open_indexed(prefix), range(5), 8, settings)
    bare = GPTDataset(open_indexed(prefix), range(5), 8, replace(settings, cache_dir=None))
    np.testing.assert_array_equal(moved.batch(range(8))["tokens"], bare.batch(range(8))["tokens"])
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2


def test_seed_changes_the_order(indexed):
    orders = [
        GPTDataset(indexed, range(5), 40, GPTSettings(4, seed=seed)).index.shuffle_index.tolist()
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


class TestMock:
    settings = GPTSettings(sequence_length=6, vocab_size=50)

    def test_a_sample_is_a_function_of_its_number(self):
        one, two = MockGPTDataset(10, self.settings), MockGPTDataset(500, self.settings)
        np.testing.assert_array_equal(one.batch([4, 2])["tokens"], two.batch([4, 2])["tokens"])
        assert one[3]["tokens"].tolist() != one[4]["tokens"].tolist()
        assert one[3]["labels"][:-1].tolist() == one[3]["tokens"][1:].tolist()

    def test_seed_and_split_change_it(self):
        texts = [
            MockGPTDataset(1, replace(self.settings, seed=seed), name)[0]["tokens"].tolist()
            for seed, name in ((1, "train"), (2, "train"), (1, "valid"))
        ]
        assert texts[0] != texts[1]
        assert texts[0] != texts[2]

    def test_ids_are_of_the_vocabulary(self):
        ids = MockGPTDataset(200, self.settings).batch(range(200))["tokens"]
        assert (ids.min(), ids.max()) == (0, 49)

    @pytest.mark.parametrize("change", [{"sequence_length": 7}, {"vocab_size": 51}, {"seed": 3}])
    def test_its_description_has_all_that_samples_depend_on(self, change):
        """Length and vocabulary were missing: ranks or runs with other samples took theirs for the same."""
        one, other = MockGPTDataset(4, self.settings), MockGPTDataset(4, replace(self.settings, **change))
        assert one[0]["tokens"].tolist() != other[0]["tokens"].tolist()
        assert one.description != other.description

    def test_refuses_what_it_cannot_give(self):
        with pytest.raises(DataError, match="`vocab_size`"):
            MockGPTDataset(3, GPTSettings(4))
        with pytest.raises(IndexError):
            MockGPTDataset(3, self.settings)[3]
