"""Claim: the analyzer measures a GPT's samples at least 5 times as fast as DeepSpeed's `DataAnalyzer`.

`python -m benchmarks.analyzer [--samples 40000] [--rounds 3]` makes random text, and times map and reduce of
`vocab_rarity` over samples of 512 tokens, on two processes, from the open dataset to the index files.
DeepSpeed gets the same samples from the same `GPTDataset`, a batch of 512 at a time, and the metric that
Megatron-DeepSpeed gives it, row by row, without its log lines. Contenders take turns; JSON lines hold
medians, ratios of medians and whether the index files have the same rows. The exit status is 1 if
they do not, or if the ratio is below 5. Without DeepSpeed, only our own speed is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import GPTSettings
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_efficiency.analyzed import AnalyzedDataset
from megazero.data_efficiency.map import ChunkAssignment, ChunkGrid, MapJob, MetricFolder, run_map
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.metrics import RarityTable, Samples, VocabularyRarity
from megazero.data_efficiency.reduce import reduce_metric

LENGTH, VOCABULARY, PROCESSES, BATCH, TARGET = 512, 50257, 2, 512, 5.0
NAME = "vocab_rarity"


def training_samples(folder: Path, samples: int):
    """A dataset of so many samples of text with Zipf's distribution."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        for _ in range(-(-(samples * LENGTH + 1) // 1_000_000)):
            writer.add_raw(np.minimum(rng.zipf(1.2, 1_000_000), VOCABULARY - 1), np.full(1000, 1000))
    settings = GPTSettings(LENGTH, vocab_size=VOCABULARY)
    request = DatasetRequest(
        GPTBuilder(settings),
        (None, 0, 0),
        DataSources((str(folder / "text"),), "1,0,0"),
        train_exact_num_epochs=1,
    )
    return build_datasets(request)[0]


def ours(dataset, table: RarityTable, out: Path) -> None:
    """Map and reduce with this package."""
    facts, grid = AnalyzedDataset.of(dataset), ChunkGrid.of(len(dataset))
    metric = VocabularyRarity(table)
    folder = MetricFolder.of(out, metric, facts, grid)
    for _ in run_map(
        MapJob(lambda: dataset, ((metric, folder),)), ChunkAssignment(processes=PROCESSES), dataset
    ):
        pass
    for _ in reduce_metric(folder, facts, PROCESSES):
        pass


class AsTorch:
    """The samples one by one, as Megatron-DeepSpeed's dataset gives them."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        arrays = self.dataset[index]
        return {
            "text": np.concatenate([arrays["tokens"], arrays["labels"][-1:]]),
            "index": np.array([index]),
        }


def theirs(dataset, table: RarityTable, out: Path) -> None:
    """The same with DeepSpeed."""
    import torch
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    torch.set_num_threads(1)
    nats = torch.from_numpy(table.nats)

    def rarity(data: dict) -> torch.Tensor:
        return torch.tensor([int(nats[row].sum()) for row in data["text"]], dtype=torch.long)

    def as_int64(data: dict) -> np.ndarray:
        return rarity(data).numpy()

    job = DataAnalyzer(
        AsTorch(dataset),
        num_threads=PROCESSES,
        num_threads_reduce=PROCESSES,
        batch_size=BATCH,
        metric_names=[NAME],
        metric_functions=[as_int64],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[np.int64],
        save_path=str(out),
    )
    job.run_map()
    job.run_reduce()


def timed(work: Callable[..., None], dataset, table: RarityTable, out: Path) -> float:
    """Seconds of one run into an empty folder; what is printed is dropped."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        work(dataset, table, out)
    return time.perf_counter() - began


def index_in(out: Path) -> MetricIndex:
    """The index files of a run."""
    prefix = out / NAME / NAME
    return MetricIndex.open(f"{prefix}_index_to_sample", f"{prefix}_index_to_metric")


def run(args: argparse.Namespace, scratch: Path) -> bool:
    """Prints a JSON line per contender; True if results agree and the target is reached."""
    dataset = training_samples(scratch, args.samples)
    first = Samples.of(np.arange(1000), dataset.batch(np.arange(1000)))
    table = RarityTable.of(np.bincount(first.text.reshape(-1), minlength=VOCABULARY))
    contenders: dict[str, Callable[..., None]] = {"megazero": ours}
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        contenders["DeepSpeed DataAnalyzer"] = theirs
    else:
        print("DeepSpeed DataAnalyzer: left out, deepspeed is not installed", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, work in contenders.items():
            times[name].append(timed(work, dataset, table, scratch / name))
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    indexes = {name: index_in(scratch / name) for name in contenders}
    same = all(
        np.array_equal(getattr(index, part), getattr(indexes["megazero"], part))
        for index in indexes.values()
        for part in ("values", "ends", "samples")
    )
    slowest = max(medians.values())
    for name, measured in times.items():
        row = {
            "benchmark": "analyzer",
            "contender": name,
            "samples_per_s": round(len(dataset) / medians[name]),
            "ratio_to_slowest": round(slowest / medians[name], 2),
            "seconds": [round(second, 2) for second in measured],
            "samples": len(dataset),
            "tokens_of_a_sample": LENGTH,
            "processes": PROCESSES,
            "distinct_values": int(indexes[name].values.size),
            "same_rows": same,
        }
        print(json.dumps(row), flush=True)
    return same and (len(contenders) == 1 or slowest / medians["megazero"] >= TARGET)


def main() -> int:
    """Runs the benchmark; 0 if results agree and the target is reached."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=40_000, help="samples, about (40000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (3)")
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(parser.parse_args(), Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
