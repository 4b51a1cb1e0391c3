"""A prepared index: the samples are those of the files, and files of other data are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megazero.data.gpt_builder import GPTBuilder
from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.indexed.reader import open_indexed
from megazero.errors import DataError
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


def test_a_file_that_is_none_is_refused(indexed, tmp_path):
    built = GPTDataset(indexed, range(5), 20, SETTINGS)
    document, sample, _ = files(tmp_path, built)
    none = (document, sample, f"{tmp_path}/none.npy")
    with pytest.raises(DataError, match=r"must be a \.npy file, but .*none\.npy cannot be read"):
        GPTDataset(indexed, range(5), 20, SETTINGS, prepared=none)
