from __future__ import annotations

import numpy as np
import pytest

from megazero.data.blended import BlendedDataset, parse_blend
from megazero.data.gpt_dataset import GPTSettings
from megazero.data.mock import MockGPTDataset
from megazero.errors import DataError
from tests.data.corpora import write_golden

SETTINGS = GPTSettings(sequence_length=4, vocab_size=1000)


def mocks(*sizes: int) -> list[MockGPTDataset]:
    return [MockGPTDataset(size, SETTINGS, f"part{n}") for n, size in enumerate(sizes)]


class TestParseBlend:
    def parse(self, *entries):
        return parse_blend(entries, must_exist=False)

    def test_forms(self):
        assert self.parse("a") == [(None, "a")]
        assert self.parse("a", "b", "c") == [(None, "a"), (None, "b"), (None, "c")]
        assert self.parse("a", "b") == [(None, "a"), (None, "b")]
        assert self.parse("0.3", "a", "7", "b") == [(0.3, "a"), (7.0, "b")]
        assert self.parse("1", "a") == [(1.0, "a")]

    @pytest.mark.parametrize("entries", [("0.3", "a", "b"), ("a", "0.3", "b"), ("1",)])
    def test_odd_number(self, entries):
        with pytest.raises(DataError, match="pairs of weight and prefix"):
            self.parse(*entries)

    def test_a_dataset_of_no_weight_is_left_out(self):
        assert self.parse("0", "a", "2", "b", "0.0", "c") == [(2.0, "b")]
        with pytest.raises(DataError, match="some dataset a weight above 0"):
            self.parse("0", "a")

    @pytest.mark.parametrize("weight", ["-1", "nan", "inf", "b"])
    def test_weights(self, weight):
        with pytest.raises(DataError, match="number of at least 0"):
            self.parse(weight, "a", "1", "c")

    def test_nothing(self):
        with pytest.raises(DataError, match="is empty"):
            self.parse()

    def test_missing_files_are_named(self, tmp_path):
        golden = str(write_golden(tmp_path / "g"))
        assert parse_blend([golden]) == [(None, golden)]
        with pytest.raises(DataError, match=r"other\.idx is not a file"):
            parse_blend(["1", golden, "2", str(tmp_path / "other")])
        (tmp_path / "g.bin").unlink()
        with pytest.raises(DataError, match=r"g\.bin is not a file"):
            parse_blend([golden])

    def test_a_dataset_may_be_called_like_a_number(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_golden("2024")
        assert parse_blend(["2024"]) == [(None, "2024")]


def test_golden_order_and_items():
    parts = mocks(5, 3, 2)
    blend = BlendedDataset(parts, [0.5, 0.3, 0.2], 10)
    assert len(blend) == 10
    expected = list(zip([0, 1, 2, 0, 1, 0, 2, 0, 1, 0], [0, 0, 0, 1, 1, 2, 1, 3, 2, 4], strict=True))
    for i, (dataset, sample) in enumerate(expected):
        assert blend[i]["dataset_id"] == dataset
        np.testing.assert_array_equal(blend[i]["tokens"], parts[dataset][sample]["tokens"])
    batch = blend.batch([9, 0, 2])
    assert batch["dataset_id"].tolist() == [0, 0, 2]
    for key, array in batch.items():
        np.testing.assert_array_equal(array, np.stack([blend[i][key] for i in (9, 0, 2)]))


def test_exhaustive_blend_uses_every_sample():
    blend = BlendedDataset(mocks(3, 2, 1), None, None)
    assert blend.dataset_index.tolist() == [0, 1, 2, 0, 1, 0]
    assert blend.sample_index.tolist() == [0, 0, 0, 1, 1, 2]


def test_size_without_weights_mixes_by_size():
    blend = BlendedDataset(mocks(30, 10), None, 20)
    assert np.bincount(blend.dataset_index).tolist() == [15, 5]


def test_weights_need_no_sum_of_one():
    first = BlendedDataset(mocks(50, 50), [30, 10], 40)
    second = BlendedDataset(mocks(50, 50), [0.75, 0.25], 40)
    assert first.dataset_index.tolist() == second.dataset_index.tolist()
    assert np.bincount(first.dataset_index).tolist() == [30, 10]


def test_asking_more_than_there_is():
    with pytest.raises(DataError, match="dataset 1 of the train blend must be at least 5, but are 4"):
        BlendedDataset(mocks(5, 4), [0.5, 0.5], 10)


def test_contradictions():
    with pytest.raises(DataError, match="one for each of 2"):
        BlendedDataset(mocks(1, 1), [1.0], 1)
    with pytest.raises(DataError, match="`size` must be given"):
        BlendedDataset(mocks(1, 1), [1.0, 1.0], None)
    with pytest.raises(IndexError):
        BlendedDataset(mocks(1, 1), None, None)[2]


def test_cached_blend_is_the_same(tmp_path):
    made = BlendedDataset(mocks(5, 5), [2, 1], 6, cache_dir=tmp_path)
    loaded = BlendedDataset(mocks(5, 5), [2, 1], 6, cache_dir=tmp_path)
    assert loaded.dataset_index.tolist() == made.dataset_index.tolist() == [0, 1, 0, 0, 1, 0]
    BlendedDataset(mocks(5, 5), [1, 1], 6, cache_dir=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2
