"""DeepSpeed's own analyzer on the same samples gives the same rows, and each side reads the other's files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.metrics import (
    RarityTable,
    Samples,
    VocabularyCounts,
    VocabularyRarity,
    read_counts,
)
from tests.data_efficiency.made_up import Numbered, Valued, analyzed, rows_of

analyzer = pytest.importorskip("deepspeed.runtime.data_pipeline.data_sampling.data_analyzer")
indexed = pytest.importorskip("deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset")

SIZE, VOCABULARY = 300, 40
KINDS = ("index_to_metric", "index_to_sample", "index_to_sample_percentile_merged", "sample_to_metric")


class Texts(Numbered):
    """Random text of 12 tokens and the last label; also as DeepSpeed wants it."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.text = np.minimum(np.random.default_rng(0).zipf(1.4, (SIZE, 13)) - 1, VOCABULARY - 1)

    def batch(self, indices):
        return {"tokens": self.text[indices, :-1], "labels": self.text[indices, 1:]}

    def __getitem__(self, index):
        return {"text": self.text[index], "index": np.array([index])}


def theirs(folder: Path, name: str, function, kind: str, workers: int = 2, threads: int = 2) -> Path:
    """DeepSpeed's files, made by its own code."""

    def run(worker: int, task: str) -> None:
        job = analyzer.DataAnalyzer(
            Texts(),
            num_workers=workers,
            worker_id=worker,
            num_threads=threads,
            num_threads_reduce=2,
            batch_size=16,
            metric_names=[name],
            metric_functions=[function],
            metric_types=[kind],
            metric_dtypes=[np.int64],
            save_path=str(folder),
        )
        getattr(job, task)()

    for worker in range(workers):
        run(worker, "run_map")
    run(0, "run_reduce")
    return folder / name / name


def opened(prefix: Path | str):
    return indexed.MMapIndexedDataset(str(prefix), skip_warmup=True)


def rarity_metrics() -> tuple[VocabularyRarity, object]:
    """Ours, and the same formula over their batches."""
    text = Texts().text
    table = RarityTable.of(np.bincount(text.reshape(-1), minlength=VOCABULARY))
    return VocabularyRarity(table), lambda data: table.nats[data["text"].numpy()].sum(1).astype(np.int64)


def test_counts_are_the_same(tmp_path):
    def count(data):
        return np.bincount(data["text"].numpy().reshape(-1), minlength=VOCABULARY)

    prefix = theirs(tmp_path, "total_vocab_freq", count, "accumulate_value_over_samples")
    samples = Samples.of(np.arange(SIZE), Texts().batch(np.arange(SIZE)))
    expected = VocabularyCounts(VOCABULARY).measure(samples)
    np.testing.assert_array_equal(read_counts(f"{prefix}_metric_value"), expected)


@pytest.mark.parametrize("name", ["rarity", "negative", "few", "each"])
def test_all_files_have_the_same_rows(tmp_path, name):
    ours, function = rarity_metrics()
    values = {
        "rarity": lambda index: ours.measure(Samples.of(index, Texts().batch(index))),
        "negative": lambda index: index % 7 - 3,
        "few": lambda index: index // 200,
        "each": lambda index: index * -300 + 40,
    }[name]

    def measure(data):
        return function(data) if name == "rarity" else values(data["index"].numpy()[:, 0])

    their = theirs(tmp_path / "theirs", name, measure, "single_value_per_sample")
    mine = analyzed(tmp_path / "ours", Valued(values, name), SIZE, chunk=64)
    for kind in KINDS:
        assert rows_of(f"{mine}_{kind}") == rows_of(f"{their}_{kind}"), kind
        file = opened(f"{mine}_{kind}")
        assert [row.tolist() for row in (file[i] for i in range(len(file)))] == rows_of(f"{mine}_{kind}")
    for prefix in (mine, their):
        index = MetricIndex.open(f"{prefix}_index_to_sample", f"{prefix}_index_to_metric")
        index.verify()
        np.testing.assert_array_equal(index.samples, np.argsort(values(np.arange(SIZE)), kind="stable"))
