from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megazero.data_efficiency import sorting
from megazero.data_efficiency.analyzed import dataset_of
from megazero.data_efficiency.map import ChunkAssignment, run_map
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.reduce import reduce_metric
from megazero.errors import DataError
from tests.data_efficiency.made_up import Valued, analyzed, job_of, rows_of

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "dataset.json",
    "index_to_metric",
    "index_to_sample",
    "index_to_sample_percentile_merged",
    "sample_to_metric",
]
EXTREMES = (np.iinfo(np.int64).min, -1, 0, 1, np.iinfo(np.int64).max)


def check(prefix: Path, values: np.ndarray) -> None:
    """The files are those of these values."""
    index = MetricIndex.open(f"{prefix}_index_to_sample", f"{prefix}_index_to_metric")
    index.verify()
    distinct, counts = np.unique(values, return_counts=True)
    np.testing.assert_array_equal(index.values, distinct)
    np.testing.assert_array_equal(np.diff(index.ends, prepend=0), counts)
    np.testing.assert_array_equal(index.samples, np.argsort(values, kind="stable"))
    assert [value for (value,) in rows_of(f"{prefix}_sample_to_metric")] == values.tolist()
    rows, step = rows_of(f"{prefix}_index_to_sample"), max(1, len(distinct) // 100)
    joined = [[s for row in rows[i : i + step] for s in row] for i in range(0, len(rows), step)]
    assert rows_of(f"{prefix}_index_to_sample_percentile_merged") == joined


def test_six_samples(tmp_path):
    values = np.array([7, -3, 900, 7, 7, -3])
    prefix = analyzed(tmp_path, Valued(lambda index: values[index]), 6, chunk=2)
    assert rows_of(f"{prefix}_sample_to_metric") == [[7], [-3], [900], [7], [7], [-3]]
    assert rows_of(f"{prefix}_index_to_metric") == [[-3], [7], [900]]
    assert rows_of(f"{prefix}_index_to_sample") == [[1, 5], [0, 3, 4], [2]]
    assert rows_of(f"{prefix}_index_to_sample_percentile_merged") == [[1, 5], [0, 3, 4], [2]]
    assert sorted({path.name.partition(".")[0] for path in prefix.parent.iterdir()}) == sorted(
        f"m_{name.partition('.')[0]}" for name in FILES
    )
    assert dataset_of(f"{prefix}_index_to_sample").samples == 6


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("spread", [1, 40, 10**6])
@pytest.mark.parametrize("size", [1, 100, 600])
def test_random_values(tmp_path, monkeypatch, size, spread, processes):
    """With small ranges, so that there are many: of one value, of several, and some that end up empty."""
    monkeypatch.setattr(sorting, "_RANGE", 30)
    monkeypatch.setattr(sorting, "_SAMPLED", 200)
    values = np.random.default_rng(size + spread).integers(-spread, spread, size)
    check(
        analyzed(tmp_path, Valued(lambda index: values[index]), size, chunk=64, processes=processes), values
    )


def test_extreme_and_heavy_values(tmp_path, monkeypatch):
    monkeypatch.setattr(sorting, "_RANGE", 5)
    values = np.repeat(EXTREMES, 20)
    np.random.default_rng(0).shuffle(values)
    check(analyzed(tmp_path, Valued(lambda index: values[index]), 100, chunk=9), values)


def test_percentiles_are_joined_in_groups(tmp_path):
    values = np.random.default_rng(1).permutation(250)
    prefix = analyzed(tmp_path, Valued(lambda index: values[index]), 250)
    merged = rows_of(f"{prefix}_index_to_sample_percentile_merged")
    assert [len(row) for row in merged] == [2] * 125
    check(prefix, values)


def test_a_value_for_every_sample(tmp_path):
    """DeepSpeed keeps a file for each value, which limits them to some thousands."""
    check(analyzed(tmp_path, Valued(lambda index: -index), 5000, chunk=1000), -np.arange(5000))


def test_vectors_add_up(tmp_path):
    """The last batch is ragged: 300 samples are measured 128 at a time."""
    metric = Valued(lambda index: np.array([len(index), index.sum(), -1]), accumulates=True)
    prefix = analyzed(tmp_path, metric, 300, chunk=300)
    assert rows_of(f"{prefix}_metric_value") == [[300, 300 * 299 // 2, -3]]
    assert dataset_of(f"{prefix}_metric_value").samples == 300


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda index: np.arange(3 + (index[0] > 6)), "vectors of one length, but returned 3 and 4"),
        (lambda index: np.array([1 << 62]), "less than 2\\*\\*63"),
    ],
)
def test_vectors_that_do_not_add_up(tmp_path, function, message):
    with pytest.raises(DataError, match=message):
        analyzed(tmp_path, Valued(function, accumulates=True), 20)


def test_new_files_replace_old_ones_together(tmp_path):
    for factor in (1, 2):
        prefix = analyzed(tmp_path, Valued(lambda i, by=factor: i * by, identity={"by": factor}), 20)
        check(prefix, np.arange(20) * factor)


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    prefix = analyzed(tmp_path, Valued(lambda index: index), 20)
    job, home, facts = job_of(tmp_path, Valued(lambda index: -index, identity={"new": 1}), 20)
    list(run_map(job, ChunkAssignment()))

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("megazero.data_efficiency.disk.os.fsync", full)
        with pytest.raises(DataError, match=r"/m` must be writable.*No space left.*finished is kept"):
            list(reduce_metric(home, facts))
    check(prefix, np.arange(20))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    list(reduce_metric(home, facts))
    check(prefix, -np.arange(20))


def test_what_a_killed_reduce_left_goes_away(tmp_path):
    (tmp_path / ".m.tmp-1-dead").mkdir()
    (tmp_path / ".m.tmp-1-dead/m_index_to_sample.bin").write_bytes(b"half")
    analyzed(tmp_path, Valued(lambda index: index), 20)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def peak(samples: int, folder: Path) -> int:
    """MiB that the analysis of so many samples takes at most, in a process of its own."""
    code = (
        "import sys, resource, numpy as np; from pathlib import Path\n"
        "from tests.data_efficiency.made_up import Valued, analyzed\n"
        "from megazero.data_efficiency import sorting; sorting._RANGE = 1 << 15\n"
        "from megazero.data_efficiency.map import ChunkGrid\n"
        "n = int(sys.argv[1])\n"
        "value = lambda i: np.where(i % 3, 5, i * 7919 % 100003)\n"
        "analyzed(Path(sys.argv[2]), Valued(value), n, ChunkGrid.of(n).size)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(samples), str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    unit = 1 << 10 if sys.platform == "linux" else 1 << 20
    return int(done.stdout) // unit


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "getrusage"), reason="the peak is not known here")
def test_memory_does_not_grow_with_the_samples(tmp_path):
    few, many = peak(20_000, tmp_path / "few"), peak(250_000, tmp_path / "many")
    assert many - few < 5, (few, many)  # measured: 1, and still 1 with 1,600,000
