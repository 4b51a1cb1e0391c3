"""Maps and samples of BERT are Megatron-Core's own: compared with the real one, where it is installed.

Two things of Megatron-Core's are not compared. Its padding mask is taken from the ids after masking, so it is
compared with what follows from them, and ours with the length of the text. And its newest tokenizers draw
replacements in the order of a hash map; here it is given the ids in ascending order, as its older tokenizer
and its later versions have them.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about accelerators it would like to have
    pytest.importorskip("megatron.core.datasets.helpers_cpp")
    from megatron.core.datasets.bert_dataset import (
        BERTMaskedWordPieceDataset,
        BERTMaskedWordPieceDatasetConfig,
    )
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from megazero.data.bert.dataset import BERTSettings
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import BERTBuilder
from megazero.data.indexed.writer import IndexedDatasetWriter

SIZE = 500
SHARE_OF_PIECES = 0.3


def vocabulary() -> WordPieces:
    """500 ids, of which three in ten continue a word."""
    continues = np.random.default_rng(21).random(SIZE) < SHARE_OF_PIECES
    continues[:5] = False
    return WordPieces(cls=2, sep=3, mask=4, pad=0, continues=continues, replacements=np.arange(SIZE))


def write_text(prefix, documents: int, seed: int) -> str:
    """Documents of up to 14 sentences of up to 40 tokens, some with one far too long; some are empty."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for _ in range(documents):
            sizes = rng.integers(1, 40, rng.integers(0, 15))
            sizes[rng.random(sizes.size) < 0.002] = 700
            writer.add_document([rng.integers(5, SIZE, size) for size in sizes])
    return str(prefix)


def core_datasets(tmp_path, monkeypatch, blend, sizes, settings: BERTSettings, split="969,30,1"):
    # It asks for a rank without looking whether there are any.
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    words = settings.words
    spelled = {i: f"##{i}" if words.continues[i] else str(i) for i in range(words.size)}
    tokenizer = SimpleNamespace(
        cls=words.cls,
        sep=words.sep,
        mask=words.mask,
        pad=words.pad,
        inv_vocab=spelled,
        unique_identifiers={"pad": words.pad},
    )
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=settings.seed,
        sequence_length=settings.sequence_length,
        blend=blend,
        split=split,
        path_to_cache=str(tmp_path / "core-cache"),
        tokenizer=tokenizer,
        masking_probability=settings.mask_prob,
        short_sequence_probability=settings.short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=settings.binary_head,
    )
    return BlendedMegatronDatasetBuilder(
        BERTMaskedWordPieceDataset, list(sizes), lambda: True, config
    ).build()


def assert_same_samples(ours, theirs, indices, pad: int) -> int:
    """Compares samples; returns how many tokens Megatron-Core leaves unattended."""
    hidden = 0
    for begin in range(0, len(indices), 64):
        chosen = indices[begin : begin + 64]
        batch = ours.batch(chosen)
        for row, index in enumerate(chosen):
            item, length = theirs[int(index)], int(batch["lengths"][row])
            np.testing.assert_array_equal(batch["tokens"][row], item["text"])
            np.testing.assert_array_equal(batch["labels"][row], item["labels"])
            np.testing.assert_array_equal(batch["loss_mask"][row], item["loss_mask"])
            np.testing.assert_array_equal(batch["token_types"][row, :length], item["types"][:length])
            assert set(item["types"][length:].tolist()) <= {pad}
            # Beyond the text it fills in the id of [PAD], whatever that is.
            real = np.arange(len(item["text"])) < length
            attended = real & (batch["tokens"][row] != pad)
            np.testing.assert_array_equal(item["padding_mask"], np.where(attended, 1, pad))
            hidden += int((real & ~attended).sum())
            assert item["is_random"] == batch["is_random"][row]
            assert item["truncated"] == batch["truncated"][row]
    return hidden


CASES = {
    "short": BERTSettings(32, vocabulary(), seed=1234),
    "usual": BERTSettings(128, vocabulary(), seed=1234),
    "long": BERTSettings(512, vocabulary(), seed=77),
    "one segment": BERTSettings(128, vocabulary(), seed=5, binary_head=False),
    "many masked": BERTSettings(64, vocabulary(), seed=99, mask_prob=0.6, short_seq_prob=0.5),
    "no short ones": BERTSettings(64, vocabulary(), seed=2, short_seq_prob=0.0),
}


@pytest.mark.parametrize("name", CASES)
def test_one_dataset_in_three_splits(tmp_path, monkeypatch, name):
    settings, sizes = CASES[name], (900, 40, 10)
    prefix = write_text(tmp_path / "a", 300, 1)
    theirs = core_datasets(tmp_path, monkeypatch, ([prefix], None), sizes, settings, "8,1,1")
    ours = build_datasets(DatasetRequest(BERTBuilder(settings), sizes, DataSources((prefix,), "8,1,1")))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.rows, other.sample_index)
        assert mine.rows.dtype == other.sample_index.dtype
        indices = np.unique(np.linspace(0, len(mine) - 1, 60).astype(int))
        assert_same_samples(mine, other, indices, settings.words.pad)


def test_weighted_blend(tmp_path, monkeypatch):
    prefixes = [write_text(tmp_path / name, 80, seed) for seed, name in enumerate("ab")]
    settings, sizes = CASES["short"], (300, 30, 0)
    theirs = core_datasets(tmp_path, monkeypatch, (prefixes, [3.0, 1.0]), sizes, settings, "8,2,0")
    path = ("3.0", prefixes[0], "1.0", prefixes[1])
    ours = build_datasets(DatasetRequest(BERTBuilder(settings), sizes, DataSources(path, "8,2,0")))
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        np.testing.assert_array_equal(mine.dataset_index, other.dataset_index)
        np.testing.assert_array_equal(mine.sample_index, other.dataset_sample_index)
        assert_same_samples(mine, other, np.arange(0, len(mine), 7), settings.words.pad)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 1234, 20261])
@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_samples_over_three_epochs(tmp_path, monkeypatch, name, seed):
    """All of them, in the order of the training."""
    settings = replace(CASES[name], seed=seed)
    prefix = write_text(tmp_path / "a", 900, seed)
    epoch = len(build(prefix, settings, None))
    prefix = write_text(tmp_path / "b", 1 + 900 * 3400 // epoch, seed)
    theirs = core_datasets(tmp_path, monkeypatch, ([prefix], None), (9000, 0, 0), settings, "1")[0]
    mine = build(prefix, settings, 9000)
    assert len(build(prefix, settings, None)) * 2.9 < len(mine) < len(build(prefix, settings, None)) * 3.1
    assert len(mine) > 9500
    np.testing.assert_array_equal(mine.rows, theirs.sample_index)
    hidden = assert_same_samples(mine, theirs, np.arange(len(mine)), settings.words.pad)
    print(f"{name}, seed {seed}: {len(mine)} samples are equal; {hidden} tokens are hidden by [PAD].")


def build(prefix, settings: BERTSettings, count: int | None):
    request = DatasetRequest(BERTBuilder(settings), (count, 0, 0), DataSources((prefix,), "1"))
    return build_datasets(request)[0]
