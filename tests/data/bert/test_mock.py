from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megazero.data.bert import sample
from megazero.data.bert.dataset import BERTSettings
from megazero.data.bert.mock import MockBERTDataset
from megazero.data.bert.word_pieces import WordPieces
from megazero.errors import DataError
from tests.tables import over_table

SETTINGS = BERTSettings(sequence_length=64, words=WordPieces.numbered(50))


def test_a_sample_is_a_function_of_its_number():
    one, two = MockBERTDataset(10, SETTINGS), MockBERTDataset(500, SETTINGS)
    for name, array in one.batch([4, 2]).items():
        np.testing.assert_array_equal(array, two.batch([4, 2])[name])
        np.testing.assert_array_equal(array[1], two[2][name])
    assert one[3]["tokens"].tolist() != one[4]["tokens"].tolist()
    assert one.batch([])["tokens"].shape == (0, 64)


def test_seed_and_split_change_it():
    texts = [
        MockBERTDataset(1, replace(SETTINGS, seed=seed), name)[0]["tokens"].tolist()
        for seed, name in ((1, "train"), (2, "train"), (1, "valid"))
    ]
    assert texts[0] != texts[1]
    assert texts[0] != texts[2]


def test_samples_are_like_those_of_text():
    dataset = MockBERTDataset(3000, SETTINGS)
    batch = dataset.batch(range(3000))
    text = np.where(batch["loss_mask"] > 0, batch["labels"], batch["tokens"])
    real = np.arange(64) < batch["lengths"][:, None]
    assert set(text[real].tolist()) == {1, 2, 3, *range(5, 50)}
    assert (text == 3).sum(axis=1).tolist() == [2] * 3000
    assert abs(batch["is_random"].mean() - 0.5) < 0.03
    assert abs((batch["lengths"] < 64).mean() - 0.1) < 0.03
    assert batch["lengths"].min() >= 5
    assert abs(dataset.padding_share - (1 - real.mean())) < 0.01
    alone = MockBERTDataset(50, replace(SETTINGS, binary_head=False)).batch(range(50))
    assert (alone["is_random"].max(), alone["token_types"].max(), alone["lengths"].max()) == (0, 0, 63)


def test_the_twins_agree(monkeypatch):
    compiled = MockBERTDataset(40, SETTINGS).batch(range(40))
    monkeypatch.setattr(sample, "NATIVE", None)
    for name, array in MockBERTDataset(40, SETTINGS).batch(range(40)).items():
        np.testing.assert_array_equal(array, compiled[name])


@over_table("length", [5, 6, 512])
def test_any_length_is_filled(length):
    dataset = MockBERTDataset(200, replace(SETTINGS, sequence_length=length, short_seq_prob=0.0))
    assert set(dataset.batch(range(200))["lengths"].tolist()) == {length}
    assert dataset.padding_share == 0


def test_what_it_cannot_give():
    with pytest.raises(IndexError, match=r"must be in 0\.\.2 of mock data, but spans 3\.\.3"):
        MockBERTDataset(3, SETTINGS)[3]
    specials = replace(SETTINGS.words, replacements=np.array([0, 2, 3, 4]))
    with pytest.raises(DataError, match="must hold words"):
        MockBERTDataset(3, replace(SETTINGS, words=specials))
