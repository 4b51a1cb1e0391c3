from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megazero.data.bert.dataset import BERTSettings
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import BERTBuilder, GPTBuilder
from megazero.data.gpt_dataset import GPTSettings
from megazero.data.indexed import reader
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_efficiency.analyzed import AnalyzedDataset, dataset_of, facts_path
from megazero.errors import DataError
from tests.data.corpora import write_lengths
from tests.tables import over_table


def gpt(prefix, seed=1, length=8, epochs=1, paths=None, split="100,0,0"):
    builder = GPTBuilder(GPTSettings(length, seed))
    request = DatasetRequest(
        builder, (None, 0, 0), DataSources(paths or (str(prefix),), split), train_exact_num_epochs=epochs
    )
    return build_datasets(request)[0]


@pytest.fixture
def prefix(tmp_path) -> Path:
    return write_lengths(tmp_path / "a", [30] * 20)


def test_the_same_flags_give_the_same_facts(prefix):
    first, second = AnalyzedDataset.of(gpt(prefix)), AnalyzedDataset.of(gpt(prefix))
    assert first == second
    assert first.samples == 74
    second.check(first, "m")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed was 1 and is 2"),
        ({"length": 4}, "sequence_length was 8 and is 4"),
        ({"epochs": 2}, "epochs was 1 and is 2"),
        ({"split": "50,50,0"}, r"sequences was 0..20 and is 0..10"),
    ],
)
def test_other_flags_are_refused_and_named(prefix, change, named):
    analyzed = AnalyzedDataset.of(gpt(prefix))
    with pytest.raises(DataError, match=rf"`m_index` must be of the dataset.*{named}"):
        analyzed.check(AnalyzedDataset.of(gpt(prefix, **change)), "m_index")


def test_another_dataset_is_refused(prefix, tmp_path):
    other = write_lengths(tmp_path / "b", [29, 31] + [30] * 18)
    with pytest.raises(DataError, match="dataset was [0-9a-f]{32} and is [0-9a-f]{32}"):
        AnalyzedDataset.of(gpt(prefix)).check(AnalyzedDataset.of(gpt(other)), "m")


def test_a_blend_is_its_parts(prefix, tmp_path):
    other = write_lengths(tmp_path / "b", [40] * 20)
    both = AnalyzedDataset.of(gpt(None, paths=(str(prefix), str(other))))
    turned = AnalyzedDataset.of(gpt(None, paths=(str(other), str(prefix))))
    assert both.samples == 74 + 99
    with pytest.raises(DataError, match=r"datasets\[0\]"):
        both.check(turned, "m")


def test_a_copy_with_other_times_is_the_same_dataset(prefix, tmp_path, monkeypatch):
    """Large files are cached by their modification time, which a copy on another machine does not have."""
    monkeypatch.setattr(reader, "_FULL_HASH_LIMIT", 100)
    (tmp_path / "far").mkdir()
    for suffix in (".idx", ".bin"):
        shutil.copyfile(f"{prefix}{suffix}", tmp_path / f"far/c{suffix}")
        os.utime(tmp_path / f"far/c{suffix}", (1, 1))
    far = tmp_path / "far/c"
    assert open_indexed(prefix).fingerprint != open_indexed(far).fingerprint
    assert AnalyzedDataset.of(gpt(prefix)) == AnalyzedDataset.of(gpt(far))


def test_masking_is_not_part_of_a_sample(tmp_path):
    """Text is analyzed before it is masked, so another share of masks needs no new analysis."""
    with IndexedDatasetWriter(tmp_path / "s", "uint16") as writer:
        for _ in range(20):
            writer.add_document([np.arange(5, 15), np.arange(20, 27)])
    words = WordPieces.numbered(60)
    facts = []
    for share in (0.15, 0.4):
        builder = BERTBuilder(BERTSettings(32, words, mask_prob=share))
        request = DatasetRequest(builder, (None, 0, 0), DataSources((str(tmp_path / "s"),), "100,0,0"))
        facts.append(AnalyzedDataset.of(build_datasets(request)[0]))
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    "name",
    ["m_index_to_sample", "m_index_to_metric", "m_index_to_sample_percentile_merged", "m_metric_value", "m"],
)
def test_facts_lie_beside_any_file_of_the_metric(tmp_path, prefix, name):
    facts = AnalyzedDataset.of(gpt(prefix))
    assert dataset_of(tmp_path / name) is None
    assert facts_path(tmp_path / name) == tmp_path / "m_dataset.json"
    facts_path(tmp_path / name).write_text(facts.to_json())
    assert dataset_of(tmp_path / name) == facts


@over_table("text", ["", "[]", "{}", json.dumps({"format": "other"}), "\xff"])
def test_damaged_facts_are_refused(tmp_path, text):
    (tmp_path / "m_dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"m_dataset.json` must say in format"):
        dataset_of(tmp_path / "m_index_to_sample")
