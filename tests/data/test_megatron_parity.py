"""Files, splits, order of samples and blends are Megatron-Core's own: compared with the real one."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about accelerators it would like to have
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset as CoreGPTDataset
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset as CoreIndexedDataset
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import DocumentEnds, GPTSettings
from megazero.data.index_build import (
    build_blending_index,
    build_exhaustive_blending_index,
    build_sample_index,
    normalized,
)
from megazero.data.indexed.reader import open_indexed
from tests.data.corpora import write_golden, write_lengths

EOD = 3


@pytest.fixture
def corpora(tmp_path):
    # Large enough that every split has sequences: Megatron-Core loops for ever over a split without tokens.
    rng = np.random.default_rng(11)
    named = (("a", 2110), ("b", 900))
    return [str(write_lengths(tmp_path / name, rng.integers(1, 60, size))) for name, size in named]


def core_config(tmp_path, blend, split, length, seed, **flags):
    tokenizer = SimpleNamespace(
        vocab_size=60000, eod=EOD, pad=59999, bos=None, eos=None, unique_identifiers={"name": "test"}
    )
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        blend=blend,
        split=split,
        path_to_cache=str(tmp_path / "core-cache"),
        tokenizer=tokenizer,
        **{"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **flags},
    )


def core_datasets(config, sizes, monkeypatch):
    # The blend asks for a rank without looking whether there are any.
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    return BlendedMegatronDatasetBuilder(CoreGPTDataset, list(sizes), lambda: True, config).build()


def assert_same_samples(ours, theirs, count=60):
    assert len(ours) == len(theirs)
    indices = np.unique(np.linspace(0, len(ours) - 1, count).astype(int))
    batch = ours.batch(indices)
    for row, index in enumerate(indices):
        item = theirs[int(index)]
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(batch[key][row], item[key].numpy())


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "98,2,0", "50,30,20"])
@pytest.mark.parametrize(("length", "seed", "sizes"), [(32, 1234, (400, 9, 7)), (17, 5, (9000, 700, 30))])
def test_one_dataset_in_three_splits(tmp_path, corpora, monkeypatch, split, length, seed, sizes):
    config = core_config(tmp_path, ([corpora[0]], None), split, length, seed)
    theirs = core_datasets(config, sizes, monkeypatch)
    settings = GPTSettings(sequence_length=length, seed=seed)
    ours = build_datasets(DatasetRequest(GPTBuilder(settings), sizes, DataSources((corpora[0],), split)))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            for name in ("document_index", "sample_index", "shuffle_index"):
                expected = getattr(other, name)
                np.testing.assert_array_equal(getattr(mine.index, name), expected)
                assert getattr(mine.index, name).dtype == expected.dtype
            assert_same_samples(mine, other)


@pytest.mark.parametrize("weights", [(0.3, 0.7), (5.0, 1.0), (1.0, 1.0)])
def test_weighted_blend(tmp_path, corpora, monkeypatch, weights):
    sizes = (210, 25, 12)
    config = core_config(tmp_path, (corpora, list(weights)), "8,1,1", 16, 99)
    theirs = core_datasets(config, sizes, monkeypatch)
    path = [text for weight, prefix in zip(weights, corpora, strict=True) for text in (str(weight), prefix)]
    settings = GPTSettings(sequence_length=16, seed=99)
    ours = build_datasets(DatasetRequest(GPTBuilder(settings), sizes, DataSources(tuple(path), "8,1,1")))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.dataset_index, other.dataset_index)
        np.testing.assert_array_equal(mine.sample_index, other.dataset_sample_index)
        assert_same_samples(mine, other)


@pytest.mark.parametrize("sizes", [(None, None, None), (100, 20, 5)])
def test_blend_without_weights(tmp_path, corpora, monkeypatch, sizes):
    config = core_config(tmp_path, (corpora, None), "8,1,1", 16, 99)
    theirs = core_datasets(config, sizes, monkeypatch)
    settings = GPTSettings(sequence_length=16, seed=99)
    ours = build_datasets(DatasetRequest(GPTBuilder(settings), sizes, DataSources(tuple(corpora), "8,1,1")))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.dataset_index, other.dataset_index)
        assert_same_samples(mine, other)


def test_masks_at_end_of_document(tmp_path, corpora, monkeypatch):
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    prefix = str(write_lengths(tmp_path / "eod", [9] * 40))
    tokens = np.fromfile(f"{prefix}.bin", dtype="<u2")
    tokens[::7] = EOD
    tokens.tofile(f"{prefix}.bin")
    config = core_config(tmp_path, ([prefix], None), "1", 24, 1, **flags)
    theirs = core_datasets(config, (20, 0, 0), monkeypatch)[0]
    settings = GPTSettings(sequence_length=24, seed=1, ends=DocumentEnds(EOD, **flags))
    ours = build_datasets(DatasetRequest(GPTBuilder(settings), (20, 0, 0), DataSources((prefix,), "1")))[0]
    assert_same_samples(ours, theirs)
    documents = ours[2]["document_ids"]
    causal = np.tril(np.ones((24, 24), dtype=bool)) & (documents[:, None] == documents[None, :])
    np.testing.assert_array_equal(~causal, theirs[2]["attention_mask"][0].numpy())


def test_sample_index_of_random_cases():
    rng = np.random.default_rng(12)
    for _ in range(300):
        lengths = rng.integers(0, 40, rng.integers(2, 60)).astype(np.int32)
        tokens = int(lengths.sum())
        epochs, length, extra = int(rng.integers(1, 5)), int(rng.integers(2, 50)), int(rng.integers(0, 2))
        samples = (epochs * tokens - extra) // length
        if tokens < 2 or samples < 1:
            continue
        documents = np.tile(np.arange(lengths.size, dtype=np.int32), epochs)
        rng.shuffle(documents)
        expected = helpers.build_sample_idx_int32(lengths, documents, length, epochs, tokens, True, extra)
        np.testing.assert_array_equal(
            build_sample_index(lengths, documents, length, samples, extra), expected
        )


def test_blending_index_of_random_cases():
    rng = np.random.default_rng(13)
    for _ in range(200):
        weights = rng.random(rng.integers(1, 12)) + 1e-3
        size = int(rng.integers(1, 300))
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_blending_indices(datasets, samples, normalized(weights), weights.size, size, False)
        for mine, other in zip(build_blending_index(weights, size), (datasets, samples), strict=True):
            np.testing.assert_array_equal(mine, other)
        sizes = rng.integers(1, 60, weights.size)
        total = int(sizes.sum())
        datasets, samples = np.zeros(total, np.int16), np.zeros(total, np.int64)
        helpers.build_exhaustive_blending_indices(datasets, samples, sizes, sizes.size)
        exhaustive = build_exhaustive_blending_index(sizes)
        for mine, other in zip(exhaustive, (datasets, samples), strict=True):
            np.testing.assert_array_equal(mine, other)


def test_megatron_reads_what_we_write(tmp_path):
    prefix = write_golden(tmp_path / "g")
    theirs, ours = CoreIndexedDataset(str(prefix)), open_indexed(prefix)
    assert [s.tolist() for s in ours] == [theirs[i].tolist() for i in range(len(theirs))]
    assert theirs.document_indices.tolist() == ours.document_index.tolist()


def test_we_read_what_megatron_writes(tmp_path):
    import torch

    prefix = tmp_path / "m"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    builder.add_document(torch.arange(7), [3, 4])
    builder.add_document(torch.tensor([70000]), [1])
    builder.finalize(f"{prefix}.idx")
    ours = open_indexed(prefix)
    assert [[s.tolist() for s in ours.document(k)] for k in range(2)] == [
        [[0, 1, 2], [3, 4, 5, 6]],
        [[70000]],
    ]
    with_modes = tmp_path / "modes"
    builder = IndexedDatasetBuilder(f"{with_modes}.bin", dtype=np.uint16, multimodal=True)
    builder.add_document(torch.arange(5), [2, 3], [0, 1])
    builder.finalize(f"{with_modes}.idx")
    assert open_indexed(with_modes, multimodal=True).modes.tolist() == [0, 1]
