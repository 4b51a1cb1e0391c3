"""BERT datasets of a run: splits, blends, epochs and mock data, through `megazero.data.build`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megazero.config.tree.config import Config
from megazero.config.tree.data import DataConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.training import BatchConfig
from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.bert.mock import MockBERTDataset
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.blended import BlendedDataset
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import BERTBuilder, bert_datasets
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError

SIZE = 60
SETTINGS = BERTSettings(sequence_length=24, words=WordPieces.numbered(SIZE), seed=7)


def write_sentences(prefix, documents: int, sentences: int = 4) -> str:
    rng = np.random.default_rng(documents)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(documents):
            writer.add_document([rng.integers(5, SIZE, rng.integers(3, 15)) for _ in range(sentences)])
    return str(prefix)


@pytest.fixture
def corpora(tmp_path):
    return [write_sentences(tmp_path / name, documents) for name, documents in (("a", 100), ("b", 60))]


def request(**fields) -> DatasetRequest:
    own = {"builder": BERTBuilder(SETTINGS), "num_samples": (50, 20, 10)}
    own |= {name: fields.pop(name) for name in (*own, "train_exact_num_epochs") if name in fields}
    return DatasetRequest(sources=DataSources(**{"split": "8,1,1", **fields}), **own)


def test_splits_divide_documents(corpora):
    datasets = build_datasets(request(data_path=(corpora[0],)))
    assert [type(dataset) for dataset in datasets] == [BERTDataset] * 3
    assert [len(d) >= n for d, n in zip(datasets, (50, 20, 10), strict=True)] == [True] * 3
    for dataset, low, high in zip(datasets, (0, 80, 90), (80, 90, 100), strict=True):
        assert dataset.rows[:, 0].min() >= 4 * low
        assert dataset.rows[:, 1].max() <= 4 * high
        assert dataset.counts.used == high - low


def test_a_weighted_blend(corpora):
    train, valid, _ = build_datasets(request(data_path=("0.3", corpora[0], "0.9", corpora[1])))
    assert (len(train), len(valid)) == (13 + 38, 20)
    counts = np.bincount(train.dataset_index)
    assert abs(counts[0] / len(train) - 0.25) < 1 / len(train)
    batch = train.batch(range(len(train)))
    for i in (0, 17, 50):
        owner = train.datasets[batch["dataset_id"][i]]
        expected = owner[int(train.sample_index[i])]
        for name, array in expected.items():
            np.testing.assert_array_equal(batch[name][i], array)


def test_a_blend_knows_its_padding_and_what_to_say(corpora, tmp_path):
    lone = write_sentences(tmp_path / "c", 300, sentences=2)
    train, _, _ = build_datasets(request(data_path=("1", corpora[0], "3", lone), num_samples=(4000, 0, 0)))
    assert isinstance(train, BlendedDataset)
    one, two = (part.padding_share for part in train.datasets)
    assert abs(one - two) > 0.05
    assert train.padding_share == pytest.approx(0.25 * one + 0.75 * two, abs=1e-3)
    assert train.notes == (*train.datasets[0].notes, *train.datasets[1].notes)
    lengths = train.batch(range(4000))["lengths"]
    assert train.padding_share == pytest.approx(1 - lengths.mean() / 24, abs=0.01)


def test_prefixes_without_weights_give_an_epoch_each(corpora):
    whole, _, _ = build_datasets(request(data_path=tuple(corpora), num_samples=(None, 0, 0)))
    singles = [build_datasets(request(data_path=(p,), num_samples=(None, 0, 0)))[0] for p in corpora]
    assert len(whole) == sum(map(len, singles))
    mixed, _, _ = build_datasets(request(data_path=tuple(corpora), train_exact_num_epochs=2))
    assert [d.plan.epochs for d in mixed.datasets] == [2, 2]
    assert len(mixed) > 1.9 * len(whole)


def test_own_paths_use_whole_datasets(corpora):
    train, valid, test = build_datasets(
        request(train_data_path=(corpora[0],), valid_data_path=(corpora[1],), num_samples=(None, None, None))
    )
    assert test is None
    assert (train.counts.used, valid.counts.used) == (100, 60)


def test_a_split_without_documents(tmp_path, corpora):
    small = write_sentences(tmp_path / "small", 2)
    with pytest.warns(
        UserWarning, match="valid split is empty: split 8,1,1 gives it none of the 2 documents"
    ):
        assert build_datasets(request(data_path=(small,), num_samples=(5, 5, 0)))[1] is None
    with pytest.raises(DataError, match=r"`valid` split of .*small must have some of its documents"):
        build_datasets(request(data_path=("1", corpora[0], "1", small)))


def configured(length: int = 24, head: bool = True, **data) -> Config:
    model = ModelConfig(
        family="bert",
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        seq_length=length,
        bert_binary_head=head,
    )
    return Config(
        model=model,
        batch=BatchConfig(micro_batch_size=1),
        optimizer=OptimizerConfig(lr=1.0),
        data=DataConfig(**{"split": "8,1,1", **data}),
    )


def vocabulary(tokenizer=None) -> SimpleNamespace:
    return SimpleNamespace(size=SIZE, eod=None, tokenizer=tokenizer)


@pytest.fixture
def word_piece(tmp_path):
    path = tmp_path / "vocab.txt"
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"##{i}" if i % 3 else f"w{i}" for i in range(53)),
    ]
    path.write_text("\n".join(pieces))
    return build_tokenizer(TokenizerSpec("BertWordPieceCase", vocab_file=str(path)))


def test_a_configuration_decides_all_of_it(corpora, word_piece, tmp_path):
    config = configured(
        data_path=(corpora[0],), mask_prob=0.3, short_seq_prob=0.25, data_cache_path=str(tmp_path / "cache")
    )
    train, valid, test = bert_datasets(config, vocabulary(word_piece), (70, 20, 0))
    assert (len(train) >= 70, len(valid) >= 20, test) == (True, True, None)
    settings = train.settings
    assert (settings.mask_prob, settings.short_seq_prob, settings.seed) == (0.3, 0.25, 1234)
    assert (settings.words.size, settings.binary_head) == (60, True)
    assert len(list((tmp_path / "cache").glob("bert-*.json"))) == 2
    alone = bert_datasets(configured(head=False, data_path=(corpora[0],)), vocabulary(word_piece), (9, 0, 0))[
        0
    ]
    assert alone.batch(range(9))["token_types"].max() == 0


def test_a_cyclic_order_is_over_one_epoch(corpora, word_piece):
    config = configured(data_path=(corpora[0],), dataloader_type="cyclic")
    given = [bert_datasets(config, vocabulary(word_piece), (n, 0, 0))[0] for n in (1, 10**6)]
    builder = BERTBuilder(BERTSettings(24, SETTINGS.words))
    epoch, _, _ = build_datasets(request(builder=builder, data_path=(corpora[0],), num_samples=(None, 0, 0)))
    assert [len(dataset) for dataset in given] == [len(epoch)] * 2


def test_text_needs_a_tokenizer(corpora):
    with pytest.raises(DataError, match="`--tokenizer-type` must be given for BERT"):
        bert_datasets(configured(data_path=(corpora[0],)), vocabulary(), (9, 0, 0))
    bytes_ = build_tokenizer(TokenizerSpec("ByteLevelTokenizer"))
    with pytest.raises(DataError, match="must be a WordPiece vocabulary, but ByteLevelTokenizer is none"):
        bert_datasets(configured(data_path=(corpora[0],)), vocabulary(bytes_), (9, 0, 0))


def test_mock_data_need_none(word_piece):
    train, valid, test = bert_datasets(configured(mock_data=True), vocabulary(), (9, 4, 0))
    assert [type(dataset) for dataset in (train, valid)] == [MockBERTDataset] * 2
    assert (len(train), len(valid), test) == (9, 4, None)
    assert train.settings.words.size == SIZE
    named, _, _ = bert_datasets(configured(mock_data=True), vocabulary(word_piece), (None, 0, 0))
    assert len(named) == 100_000
    assert named.settings.words.continues.sum() == 35
    assert named.padding_share == pytest.approx(0.1 * 21 / 2 / 24)
