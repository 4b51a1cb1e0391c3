from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from megazero.data_efficiency.map import ChunkAssignment, ChunkGrid, even_part, run_map
from megazero.data_efficiency.reduce import reduce_metric
from megazero.errors import DataError
from tests.data_efficiency.made_up import Valued, analyzed, job_of, rows_of
from tests.tables import over_table


@over_table(
    ("samples", "size", "chunks"),
    [(1, 1024, 1), (1024, 1024, 1), (1025, 1024, 2), (10**6, 3907, 256), (10**8, 65536, 1526)],
)
def test_the_grid_depends_on_the_samples_alone(samples, size, chunks):
    grid = ChunkGrid.of(samples)
    assert (grid.size, len(grid)) == (size, chunks)
    assert sum(len(grid[i]) for i in (0, len(grid) - 1)) <= samples + size
    assert grid[len(grid) - 1].stop == samples
    with pytest.raises(IndexError):
        grid[len(grid)]


def test_no_samples_are_refused():
    with pytest.raises(DataError, match="at least 1, but are 0"):
        ChunkGrid.of(0)


@over_table(("length", "parts"), [(0, 3), (1, 4), (7, 3), (8, 8), (5, 9), (100, 7)])
def test_parts_are_all_of_it_in_order(length, parts):
    """An uneven split once lost or repeated samples in DeepSpeed's distributed analyzer."""
    found = [even_part(range(length), i, parts) for i in range(parts)]
    assert [i for part in found for i in part] == list(range(length))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@over_table(("workers", "processes"), [(1, 1), (1, 3), (4, 1), (3, 2), (30, 1)])
def test_shares_are_all_of_it(workers, processes):
    grid = ChunkGrid(100, 7)
    chunks = [i for w in range(workers) for i in ChunkAssignment(workers, w, processes).chunks(grid)]
    assert chunks == list(range(15))
    assert [i for t in range(processes) for i in ChunkAssignment(1, 0, processes, (t,)).chunks(grid)] == list(
        range(15)
    )


def test_specific_threads_are_exactly_those():
    """DeepSpeed started processes 0..n-1 instead of those that were named."""
    grid = ChunkGrid(40, 10)
    assert ChunkAssignment(1, 0, 4, (2,)).chunks(grid) == [2]
    assert ChunkAssignment(1, 0, 4, (3, 1, 3)).chunks(grid) == [1, 3]


@over_table("values", [(2, 2), (2, -1), (1, 1)])
def test_a_worker_that_there_is_not_is_refused(values):
    with pytest.raises(DataError, match="analyzing-worker-id"):
        ChunkAssignment(*values)


@over_table("only", [(4,), (-1,), (0, 9)])
def test_a_thread_that_there_is_not_is_refused(only):
    with pytest.raises(DataError, match="analyzing-specific-threads"):
        ChunkAssignment(1, 0, 4, only)


def test_what_is_there_is_not_measured_again(tmp_path):
    seen = []

    def values(index):
        seen.extend(index.tolist())
        return index

    job, home, _ = job_of(tmp_path, Valued(values), 30, 10)
    first = run_map(job, ChunkAssignment())
    assert [next(first), next(first)] == [0, 10]
    first.close()
    assert list(run_map(job, ChunkAssignment())) == [10, 20, 30]
    assert list(run_map(job, ChunkAssignment())) == [30]
    assert seen == list(range(30))
    assert home.read(1).tolist() == list(range(10, 20))


def test_chunks_of_other_settings_are_left_alone(tmp_path):
    """Files of an aborted run with other settings were once appended to."""
    for factor in (1, 2):
        metric = Valued(lambda index, by=factor: index * by, identity={"by": factor})
        job, home, facts = job_of(tmp_path, metric, 30, 10)
        runs = run_map(job, ChunkAssignment())
        assert next(runs) == 0
        if factor == 1:
            next(runs)
            runs.close()
    assert list(runs) == [10, 20, 30]
    list(reduce_metric(home, facts))
    assert rows_of(home.results / "m_sample_to_metric") == [[2 * i] for i in range(30)]
    assert len(list(home.results.glob("map-*"))) == 1


@over_table("processes", [1, 3])
@over_table("size", [1, 6, 7, 8, 50])
def test_any_number_of_processes_gives_the_same(tmp_path, size, processes):
    share = ChunkAssignment(processes=processes)
    prefix = analyzed(tmp_path, Valued(lambda index: index % 3), size, share=share, processes=processes)
    assert rows_of(f"{prefix}_sample_to_metric") == [[i % 3] for i in range(size)]
    expected = [[i for i in range(size) if i % 3 == k] for k in range(min(3, size))]
    assert rows_of(f"{prefix}_index_to_sample") == expected


def test_workers_on_several_machines_add_up(tmp_path):
    metric = Valued(lambda index: np.bincount(index % 5, minlength=5), accumulates=True)
    job, home, facts = job_of(tmp_path, metric, 50)
    for worker in (2, 0):
        list(run_map(job, ChunkAssignment(3, worker)))
    with pytest.raises(
        DataError, match=r"values of all 50 samples, but 21 are missing, the first are 14..20"
    ):
        list(reduce_metric(home, facts))
    assert not list(home.results.glob("*.idx"))
    list(run_map(job, ChunkAssignment(3, 1, 2)))
    list(reduce_metric(home, facts))
    assert rows_of(home.results / "m_metric_value") == [[10] * 5]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_a_metric_raises_names_it(tmp_path, processes):
    def fails(index):
        if 30 in index:
            raise KeyError("gone")
        return index

    job, home, _ = job_of(tmp_path, Valued(fails), 50, 10)
    with pytest.raises(
        DataError, match=r"metric `m` on samples 30..39.*raised KeyError: 'gone' .*test_map.py"
    ):
        list(run_map(job, ChunkAssignment(processes=processes)))
    assert 3 in home.missing(range(5))
    assert len(home.missing(range(5))) < 5


def test_a_killed_worker_is_an_error_and_what_it_finished_stays(tmp_path):
    def dies(index):
        if 20 in index:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    job, home, _ = job_of(tmp_path, Valued(dies), 50, 10)
    with pytest.raises(DataError, match=r"worker process \d+ must finish its work, but ended with status -9"):
        list(run_map(job, ChunkAssignment(processes=2)))
    assert 2 in home.missing(range(5))


@over_table(
    ("spoil", "message"),
    [
        (lambda path: np.save(path, np.arange(9)), r"must hold 10 of int64, but holds \[9\]"),
        (lambda path: np.save(path, np.arange(10.0)), "of float64"),
        (lambda path: path.write_bytes(b"x"), "must be a .npy file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "must be a .npy file"),
    ],
)
def test_a_damaged_chunk_is_refused(tmp_path, spoil, message):
    job, home, facts = job_of(tmp_path, Valued(lambda index: index), 30, 10)
    list(run_map(job, ChunkAssignment()))
    spoil(home.path(1))
    with pytest.raises(DataError, match=message):
        list(reduce_metric(home, facts))
    assert [path.name for path in home.results.iterdir()] == [home.chunks.name]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    job, home, _ = job_of(tmp_path, Valued(lambda index: index), 30, 10)
    with monkeypatch.context() as patch:
        patch.setattr("megazero.data_efficiency.disk.os.fsync", full)
        with pytest.raises(DataError, match=r"00000000.npy` must be writable.*No space left"):
            list(run_map(job, ChunkAssignment()))
    assert list(home.chunks.iterdir()) == []
