from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from megazero.config.tree.config import Config
from megazero.config.tree.data import DataConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.training import BatchConfig
from megazero.data.blended import BlendedDataset
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder, gpt_datasets
from megazero.data.gpt_dataset import GPTDataset, GPTSettings
from megazero.data.sources import contents
from megazero.data.splits import SplitReading
from megazero.errors import DataError
from tests.data.corpora import write_lengths

SETTINGS = GPTSettings(sequence_length=8, seed=7, vocab_size=60000)


@pytest.fixture
def corpora(tmp_path):
    rng = np.random.default_rng(8)
    prefixes = []
    for name, sequences in (("a", 100), ("b", 60)):
        prefixes.append(str(write_lengths(tmp_path / name, rng.integers(10, 40, sequences))))
    return prefixes


def request(**fields) -> DatasetRequest:
    own = {"builder": GPTBuilder(SETTINGS), "num_samples": (50, 20, 10)}
    own |= {name: fields.pop(name) for name in (*own, "train_exact_num_epochs") if name in fields}
    return DatasetRequest(sources=DataSources(**{"split": "8,1,1", **fields}), **own)


def test_one_dataset_is_split(corpora):
    train, valid, test = build_datasets(request(data_path=(corpora[0],)))
    assert [type(d) for d in (train, valid, test)] == [GPTDataset] * 3
    assert [len(d) >= n for d, n in zip((train, valid, test), (50, 20, 10), strict=True)] == [True] * 3
    starts = train.indexed.offsets // 2
    for dataset, low, high in ((train, 0, 80), (valid, 80, 90), (test, 90, 100)):
        ids = dataset.batch(range(len(dataset)))["tokens"]
        end = starts[high] if high < 100 else train.indexed.total_tokens
        assert ids.min() >= starts[low]
        assert ids.max() < end


def test_weighted_blend_sizes_and_ratio(corpora):
    train, valid, _ = build_datasets(request(data_path=("0.3", corpora[0], "0.9", corpora[1])))
    assert isinstance(train, BlendedDataset)
    assert (len(train), len(valid)) == (13 + 38, 20)  # ceil(50 / 4) + ceil(150 / 4); ceil(5) + ceil(15)
    counts = np.bincount(train.dataset_index)
    assert abs(counts[0] / len(train) - 0.25) < 1 / len(train)
    assert [len(d) >= n for d, n in zip(train.datasets, (14, 39), strict=True)] == [True, True]
    assert train[0]["dataset_id"] == 1


def test_one_weighted_prefix_is_a_blend_of_one(corpora):
    train, _, _ = build_datasets(request(data_path=("1.0", corpora[0])))
    assert isinstance(train, BlendedDataset)
    assert len(train) == 50


def test_unweighted_prefixes_mix_by_size(corpora):
    whole, _, _ = build_datasets(request(data_path=tuple(corpora), num_samples=(None, 0, 0)))
    assert len(whole) == sum(len(d) for d in whole.datasets)
    assert [d.plan.epochs for d in whole.datasets] == [1, 1]
    part, valid, test = build_datasets(request(data_path=tuple(corpora), num_samples=(32, 0, 0)))
    assert len(part) == 32
    assert (valid, test) == (None, None)


def test_own_paths_use_whole_datasets(corpora):
    train, valid, test = build_datasets(
        request(train_data_path=(corpora[0],), valid_data_path=(corpora[1],), num_samples=(None, None, None))
    )
    assert test is None
    assert train.plan.tokens_per_epoch == train.indexed.total_tokens
    assert valid.indexed.prefix == corpora[1]


def test_a_part_of_a_dataset_is_split_within_itself(corpora):
    """`--data-path x[0:0.5]` was split as the whole dataset."""
    datasets = build_datasets(request(data_path=(f"{corpora[0]}[0.5:0.9]",)))
    starts = datasets[0].indexed.offsets // 2
    for dataset, low, high in zip(datasets, (50, 82, 86), (82, 86, 90), strict=True):
        ids = dataset.batch(range(len(dataset)))["tokens"]
        assert starts[low] <= ids.min()
        assert ids.max() < starts[high]


def test_an_empty_split_says_how_much_was_divided(corpora):
    with pytest.warns(UserWarning, match="split is empty: split 969,30,1 gives it none of the 5 sequences"):
        build_datasets(request(data_path=(f"{corpora[0]}[0:0.05]",), split="969,30,1"))


def test_splits_without_share_or_sequences_are_none(corpora):
    assert build_datasets(request(data_path=(corpora[0],), split="1"))[1:] == (None, None)
    with pytest.warns(
        UserWarning, match="test split is empty: split 9990,9,1 gives it none of the 100 sequences"
    ):
        train, valid, test = build_datasets(
            request(data_path=(corpora[0],), split="9990,9,1", num_samples=(5, 0, 5))
        )
    assert valid is None
    assert test is None
    assert len(train) >= 5


def test_a_blend_where_only_one_dataset_has_no_share_is_refused(corpora, tmp_path):
    small = str(write_lengths(tmp_path / "small", [500, 500]))
    with pytest.raises(DataError, match=r"`valid` split of .*small must have some of its sequences"):
        build_datasets(request(data_path=("1", corpora[0], "1", small)))


def test_exact_epochs(corpora):
    train, valid, _ = build_datasets(request(data_path=(corpora[0],), train_exact_num_epochs=3))
    assert train.plan.epochs == 3
    assert len(train) == (3 * train.plan.tokens_per_epoch - 1) // 8
    assert valid.plan.epochs == 1
    mixed, _, _ = build_datasets(request(data_path=tuple(corpora), train_exact_num_epochs=2))
    assert [d.plan.epochs for d in mixed.datasets] == [2, 2]
    assert len(mixed) == sum(len(d) for d in mixed.datasets)
    with pytest.raises(DataError, match="without weights"):
        build_datasets(request(data_path=("1", corpora[0]), train_exact_num_epochs=2))


def test_split_reading_is_a_choice(tmp_path):
    prefix = str(write_lengths(tmp_path / "two", [30, 30]))
    core = build_datasets(request(data_path=(prefix,), split="1,0,1", num_samples=(1, 0, 1)))
    assert (len(core[0]._ids), len(core[2]._ids)) == (1, 1)
    fields = {"data_path": (prefix,), "split": "1,1,1", "num_samples": (1, 1, 1)}
    with pytest.warns(UserWarning, match="valid split is empty"):
        assert [d is None for d in build_datasets(request(**fields))] == [False, True, False]
    with pytest.warns(UserWarning, match="train split is empty"):
        mds = build_datasets(request(**fields, split_reading=SplitReading.MEGATRON_DEEPSPEED))
    assert [d is None for d in mds] == [True, False, False]


def cyclic_train(samples: int, **data) -> int | None:
    """The number of training samples of a run with a cyclic order."""
    fields = {"dataloader_type": "cyclic", "data_cache_path": None, "split": "8,1,1", **data}
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8),
        batch=BatchConfig(micro_batch_size=1),
        optimizer=OptimizerConfig(lr=1.0),
        data=DataConfig(**fields),
    )
    train, valid, _ = gpt_datasets(
        config, SimpleNamespace(size=60000, eod=None, tokenizer=None), (samples, 20, 0)
    )
    assert len(valid) >= 20
    return None if train is None else len(train)


def test_a_cyclic_epoch_is_the_data_however_long_the_training(corpora):
    one, two = (len(build_datasets(request(data_path=(p,), num_samples=(None, 0, 0)))[0]) for p in corpora)
    assert {cyclic_train(n, data_path=(corpora[0],)) for n in (1, 50, 10**6)} == {one}
    assert {cyclic_train(n, data_path=tuple(corpora)) for n in (1, 50, 10**6)} == {one + two}
    assert {cyclic_train(n, mock_data=True) for n in (1, 50, 10**6)} == {100_000}
    assert cyclic_train(0, data_path=(corpora[0],)) is None


def test_what_has_no_epoch_is_as_long_as_the_training(corpora):
    """A weighted blend, and what Megatron's order is over."""
    assert cyclic_train(50, data_path=("1", corpora[0], "1", corpora[1])) == 50
    assert cyclic_train(50, mock_data=True, data_sharding=True) == 50
    assert cyclic_train(50, mock_data=True, dataloader_type="single") == 50


def test_mock_needs_no_files():
    train, valid, test = build_datasets(request(mock=True, num_samples=(9, 4, 0)))
    assert (len(train), len(valid), test) == (9, 4, None)
    assert train[0]["tokens"].shape == (8,)


def test_sources_exclude_each_other(corpora):
    with pytest.raises(DataError, match="but is none"):
        request()
    with pytest.raises(DataError, match="data_path and mock"):
        request(mock=True, data_path=(corpora[0],))
    with pytest.raises(DataError, match="data_path and train_data_path"):
        request(valid_data_path=(corpora[1],), data_path=(corpora[0],))


def test_cache_directory_is_shared_by_all(corpora, tmp_path):
    settings = replace(SETTINGS, cache_dir=tmp_path / "cache")
    asked = request(builder=GPTBuilder(settings), data_path=("1", corpora[0], "2", corpora[1]))
    first, second = build_datasets(asked), build_datasets(asked)
    assert len(list((tmp_path / "cache").glob("*.json"))) == 9
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.batch(range(10))["tokens"], two.batch(range(10))["tokens"])


def test_a_dataset_that_is_named_twice_is_one_entry(corpora, tmp_path, monkeypatch):
    """Two entries gave the same samples in the same order: batches of equal pairs."""
    a, b = corpora
    for suffix in (".idx", ".bin"):
        (tmp_path / f"link{suffix}").symlink_to(f"{a}{suffix}")
    monkeypatch.chdir(tmp_path)

    def built(*path: str, size: int | None = 50):
        return build_datasets(request(data_path=path, num_samples=(size, 0, 0)))[0]

    def order(dataset) -> list[list[int]]:
        return dataset.batch(range(len(dataset)))["tokens"].tolist()

    once = order(built("3", a, "1", b))
    for again in (
        ("1", a, "1", b, "2", a),
        ("2", a, "1", str(tmp_path / "link"), "1", b),
        ("1", "a", "2", a, "1", b),
    ):
        blend = built(*again)
        assert order(blend) == once
        (note,) = blend.notes
        assert note.startswith(f"{again[1]} is named 2 times in a blend: it is one dataset")
        assert [record["named"] for record in contents(blend)] == [2, 1]
    assert [record["named"] for record in contents(built("3", a, "1", b))] == [1, 1]
    halves = built("1", f"{a}[0:0.5]", "1", f"{a}[0.5:1]")
    assert (halves.mentions, halves.notes) == ([1, 1], ())

    # Without weights, each mention gives one epoch.
    alone, twice = built(a, size=None), built(a, b, "link", size=None)
    assert [dataset.plan.epochs for dataset in twice.datasets] == [2, 1]
    assert len(built(a, a, size=None)) >= 2 * len(alone)
    pairs = [x == y for x, y in pairwise(order(built(a, a, size=None)))]
    assert sum(pairs) < 3
