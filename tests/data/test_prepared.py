"""A prepared index: the samples are those of the files, and files of other data are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.from_config import BERTBuilder, GPTBuilder
from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed.reader import open_indexed
from megazero.data_efficiency.analyzed import AnalyzedDataset
from megazero.errors import DataError
from tests.data.bert.golden import WORDS, golden_corpus
from tests.data.corpora import write_lengths

SETTINGS = GPTSettings(8, seed=3)


@pytest.fixture
def indexed(tmp_path: Path):
    return open_indexed(write_lengths(tmp_path / "text", [5, 30, 12, 7, 21]))


def files(folder: Path, dataset: GPTDataset, **changes: np.ndarray) -> tuple[str, str, str]:
    """The index of a dataset in three files, as Megatron-DeepSpeed writes them."""
    names = ("document_index", "sample_index", "shuffle_index")
    arrays = {name: np.asarray(getattr(dataset.index, name)) for name in names} | changes
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return tuple(str(folder / f"{name}.npy") for name in names)  # type: ignore[return-value]


def test_its_samples_are_in_the_order_of_the_files(indexed, tmp_path):
    built = GPTDataset(indexed, range(5), 20, replace(SETTINGS, seed=99))
    read = GPTDataset(indexed, range(5), 20, SETTINGS, prepared=files(tmp_path, built))
    assert len(read) >= 20
    for number in range(len(built)):
        np.testing.assert_array_equal(read[number]["tokens"], built[number]["tokens"])
    other = GPTDataset(indexed, range(5), 20, SETTINGS)
    # Sample numbers of an analysis are those of one order alone.
    with pytest.raises(DataError, match="`m` must be of the dataset that is trained on .* prepared was None"):
        AnalyzedDataset.of(other).check(AnalyzedDataset.of(read), "m")
    again = GPTDataset(indexed, range(5), 20, SETTINGS, prepared=files(tmp_path, built))
    assert again.description == read.description
    assert any((read[number]["tokens"] != other[number]["tokens"]).any() for number in range(20))


def test_validation_is_built_as_ever(indexed, tmp_path):
    built = GPTDataset(indexed, range(5), 20, replace(SETTINGS, seed=99))
    builder = GPTBuilder(SETTINGS, prepared=files(tmp_path, built))
    valid = builder.build(indexed, range(5), 20, "valid", None)
    plain = GPTDataset(indexed, range(5), 20, SETTINGS, "valid")
    np.testing.assert_array_equal(valid.index.shuffle_index, plain.index.shuffle_index)
    train = builder.build(indexed, range(5), 20, "train", None)
    np.testing.assert_array_equal(train.index.shuffle_index, built.index.shuffle_index)


def test_an_index_of_other_data_is_refused(indexed, tmp_path):
    built = GPTDataset(indexed, range(5), 20, SETTINGS)
    paths = files(tmp_path, built)
    with pytest.raises(DataError, match="must have each of the 4 sequences"):
        GPTDataset(indexed, range(4), 20, SETTINGS, prepared=paths)
    with pytest.raises(DataError, match="does not fit"):
        GPTDataset(indexed, range(5), 20, replace(SETTINGS, sequence_length=7), prepared=paths)
    with pytest.raises(DataError, match="are fewer than the 500 of the training"):
        GPTDataset(indexed, range(5), 500, SETTINGS, prepared=paths)
    twice = np.zeros(len(built.index.shuffle_index), dtype=np.int64)
    paths = files(tmp_path, built, shuffle_index=twice)
    with pytest.raises(DataError, match="does not fit"):
        GPTDataset(indexed, range(5), 20, SETTINGS, prepared=paths)


def sentences(folder: Path):
    return golden_corpus(folder), BERTSettings(sequence_length=32, words=WORDS, seed=3)


def test_the_samples_of_a_bert_are_those_of_the_file(tmp_path):
    indexed, settings = sentences(tmp_path)
    built = BERTDataset(indexed, range(30), 100, replace(settings, seed=99))
    np.save(tmp_path / "rows.npy", built.rows)
    builder = BERTBuilder(settings, str(tmp_path / "rows.npy"))
    read = builder.build(indexed, range(30), 100, "train", None)
    other = BERTDataset(indexed, range(30), 100, settings)
    np.testing.assert_array_equal(read.rows, built.rows)
    assert not np.array_equal(other.rows[:100], built.rows[:100])
    same = BERTDataset(indexed, range(30), 100, built.settings, prepared=builder.prepared)
    for name, array in built.batch(range(50)).items():
        np.testing.assert_array_equal(same.batch(range(50))[name], array)
    assert read.description != other.description
    valid = builder.build(indexed, range(30, 40), 20, "valid", None)
    plain = BERTDataset(indexed, range(30, 40), 20, settings, "valid")
    np.testing.assert_array_equal(valid.rows, plain.rows)


def test_sentences_of_other_data_are_refused(tmp_path):
    indexed, settings = sentences(tmp_path)
    rows = BERTDataset(indexed, range(30), 100, settings).rows
    path = str(tmp_path / "rows.npy")

    def refusal(array: np.ndarray, documents: range = range(30), samples: int = 100) -> str:
        np.save(path, array)
        with pytest.raises(DataError) as caught:
            BERTDataset(indexed, documents, samples, settings, prepared=path)
        return str(caught.value)

    assert "each sentence once per epoch" in refusal(rows, range(40))
    assert "sentences that are not there" in refusal(rows, range(20))
    assert "rows must be at least 5000" in refusal(rows, samples=5000)
    assert "unsigned integers [samples, 3]" in refusal(rows[:, :2])
    twice = rows.copy()
    twice[1] = twice[0]
    assert "each sentence once per epoch" in refusal(twice)
    with pytest.raises(DataError, match=r"must be a \.npy file"):
        BERTDataset(indexed, range(30), 100, settings, prepared=str(tmp_path / "none.npy"))


def test_a_file_that_is_none_is_refused(indexed, tmp_path):
    built = GPTDataset(indexed, range(5), 20, SETTINGS)
    document, sample, _ = files(tmp_path, built)
    none = (document, sample, f"{tmp_path}/none.npy")
    with pytest.raises(DataError, match=r"must be a \.npy file, but .*none\.npy cannot be read"):
        GPTDataset(indexed, range(5), 20, SETTINGS, prepared=none)
