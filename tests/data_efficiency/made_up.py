"""A dataset and metrics whose values are known: functions of the sample's number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.data_efficiency.analyzed import AnalyzedDataset
from megazero.data_efficiency.map import ChunkAssignment, ChunkGrid, MapJob, MetricFolder, run_map
from megazero.data_efficiency.metrics import Samples
from megazero.data_efficiency.reduce import reduce_metric, reduce_steps
from megazero.data_efficiency.row_file import RowFile

FACTS = AnalyzedDataset("0" * 32, 0, {})


class Numbered:
    """Samples of four tokens: i, i + 1, ..., the last of which is their last label."""

    name, padding_share, notes = "train", 0.0, ()

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    @property
    def description(self) -> dict[str, object]:
        return {"kind": "numbered", "samples": self.size}

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = np.asarray(indices)[:, None] + np.arange(3)
        return {"tokens": tokens, "labels": tokens + 1}


@dataclass(frozen=True)
class Valued:
    """A metric that is a function of the samples' numbers, [b] -> [b] or a vector."""

    function: Callable[[np.ndarray], np.ndarray]
    name: str = "m"
    accumulates: bool = False
    identity: Mapping[str, object] = None

    def measure(self, samples: Samples) -> np.ndarray:
        return self.function(samples.index)


def job_of(
    folder: Path, metric: Valued, size: int, chunk: int = 7
) -> tuple[MapJob, MetricFolder, AnalyzedDataset]:
    """An analysis of so many samples in small chunks."""
    dataset = Numbered(size)
    facts = AnalyzedDataset.of(dataset)
    kept = (
        metric
        if metric.identity is not None
        else Valued(metric.function, metric.name, metric.accumulates, {})
    )
    home = MetricFolder.of(folder, kept, facts, ChunkGrid(size, chunk))
    return MapJob(lambda: dataset, ((kept, home),)), home, facts


def analyzed(
    folder: Path,
    metric: Valued,
    size: int,
    chunk: int = 7,
    share: ChunkAssignment | None = None,
    processes: int = 1,
) -> Path:
    """The path of the metric's files, without what comes after its name."""
    job, home, facts = job_of(folder, metric, size, chunk)
    list(run_map(job, share or ChunkAssignment()))
    done = list(reduce_metric(home, facts, processes))
    assert done[-1] == reduce_steps(home)
    return home.results / metric.name


def rows_of(prefix: Path | str) -> list[list[int]]:
    """The rows of a file, as lists."""
    file = RowFile(prefix)
    return [row.tolist() for row in np.split(file.elements, np.cumsum(file.lengths)[:-1])]
