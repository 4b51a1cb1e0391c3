"""Workers that do not go on are named, and end the run; slow ones that do go on are left alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest

from megazero.data.tokenizers.build import TokenizerSpec
from megazero.data.workers import can_fork
from megazero.data_tools.preprocess_data import main
from megazero.data_tools.preprocessing import pipeline
from megazero.data_tools.preprocessing.chunks import cut
from megazero.data_tools.preprocessing.encode import ChunkEncoder, EncodeJob
from megazero.data_tools.preprocessing.pool import WorkerPool
from megazero.data_tools.preprocessing.watch import WorkerPatience, WorkerWatch
from megazero.errors import DataError
from tests.data_tools.conftest import NULL, visible, write_jsonl

JOB = EncodeJob(TokenizerSpec("NullTokenizer", vocab_size=1000), ("text",))
QUICK = WorkerPatience(stopped=0.3, busy=0.6, look=0.05)

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a process is stopped")


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "f.jsonl", [{"text": "1 2"}] * 300)


def slowed(monkeypatch, seconds):
    """Each chunk takes a worker so many seconds, or what a function of its number says.

    Only workers that are forked know of it, and no process is forked while an earlier test's thread ends.
    """
    patience = time.monotonic() + 10
    while not can_fork() and time.monotonic() < patience:
        time.sleep(0.01)
    assert can_fork(), threading.enumerate()
    real = ChunkEncoder.__call__

    def slow(self, chunk):
        time.sleep(seconds(chunk.number) if callable(seconds) else seconds)
        return real(self, chunk)

    monkeypatch.setattr(ChunkEncoder, "__call__", slow)


@linux
@pytest.mark.parametrize("packed", [False, True])
def test_a_stopped_worker_is_named_with_what_it_holds(path, packed):
    """Also one whose pipe is full, so that the parent hangs in writing to it, with its thread stopped too."""
    with WorkerPool(JOB, 2, patience=QUICK) as workers_pool:
        victim = next(p for p in multiprocessing.active_children() if p.name == "preprocess-1")
        os.kill(victim.pid, signal.SIGSTOP)
        chunks = list(cut([path], 50))
        if packed:
            chunks = [type(chunk)(chunk.number, path, 0, 1 << 20, b"\n" * (1 << 20)) for chunk in chunks]
        message = (
            rf"worker 1 \(process {victim.pid}\) must finish its work, but was stopped for 0.3 s; nothing "
            rf"was written. It held bytes \d+..\d+ of {path}"
        )
        with pytest.raises(DataError, match=message):
            list(workers_pool.results(chunks))
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_busy_for_ever_is_named(path, monkeypatch):
    slowed(monkeypatch, lambda number: 60 if number == 3 else 0)
    with (
        WorkerPool(JOB, 2, patience=QUICK) as workers_pool,
        pytest.raises(DataError, match=r"not done after 0.01 minutes .* It held bytes 192..256 of .*f.jsonl"),
    ):
        list(workers_pool.results(cut([path], 50)))
    assert multiprocessing.active_children() == []


def test_workers_that_go_on_slowly_are_left_alone(path, monkeypatch):
    """Each takes less than the patience for a chunk, and all of them together several times as much."""
    slowed(monkeypatch, 0.2)
    with WorkerPool(JOB, 2, patience=QUICK) as workers_pool:
        assert sum(result.lines for result in workers_pool.results(cut([path], 600))) == 300


def test_a_parent_that_has_no_time_blames_nobody(path):
    """As when the disk takes no more: results are there, and nobody reads them."""
    with WorkerPool(JOB, 2, patience=QUICK) as workers_pool:
        lines = 0
        for number, result in enumerate(workers_pool.results(cut([path], 100))):
            lines += result.lines
            time.sleep(1.5 if number in (0, 20) else 0)
    assert lines == 300


@linux
def test_a_worker_that_is_stopped_for_a_moment_is_left_alone(path, monkeypatch):
    patience = WorkerPatience(stopped=5, busy=60, look=0.05)
    with WorkerPool(JOB, 2, patience=patience) as workers_pool:
        victim = multiprocessing.active_children()[0]
        os.kill(victim.pid, signal.SIGSTOP)
        timer = threading.Timer(0.5, os.kill, (victim.pid, signal.SIGCONT))
        timer.start()
        assert sum(result.lines for result in workers_pool.results(cut([path], 50))) == 300
        timer.join()


@linux
def test_leaving_does_not_wait_for_a_stopped_worker():
    begin = time.monotonic()
    with WorkerPool(JOB, 2):
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGSTOP)
    assert time.monotonic() - begin < 10
    assert multiprocessing.active_children() == []


@linux
@pytest.mark.parametrize("partitions", ["1", "2"])
def test_the_tool_ends_with_one_sentence(tmp_path, out, path, monkeypatch, capsys, partitions):
    real = pipeline.cut

    def stopping(*args, **others):
        for chunk in real(args[0], 200):
            if chunk.start > 1000:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, signal.SIGSTOP)
            yield chunk

    monkeypatch.setattr(pipeline, "cut", stopping)
    monkeypatch.setattr("megazero.data_tools.preprocessing.watch.WorkerPatience", lambda busy: QUICK)
    flags = ["--workers", "2", "--partitions", partitions]
    assert main(["--input", path, "--output-prefix", str(out / "p"), *flags, *NULL]) == 1
    error = capsys.readouterr().err
    assert "was stopped for 0.3 s; nothing was written. It held bytes" in error
    assert "Traceback" not in error
    assert visible(out) == []
    assert multiprocessing.active_children() == []


def test_a_watch_is_stopped_while_another_thread_starts_it(monkeypatch):
    """A part that failed at once closed the pools of others as they started, and a thread that was made but
    not yet started could not be joined."""
    making, made = threading.Event(), threading.Event()

    class SlowToStart(threading.Thread):
        def start(self):
            making.set()
            assert made.wait(10)
            super().start()

    watch = WorkerWatch([], QUICK, lambda: False)
    starter = threading.Thread(target=watch.start)
    releaser = threading.Timer(0.1, made.set)
    monkeypatch.setattr("megazero.data_tools.preprocessing.watch.threading.Thread", SlowToStart)
    starter.start()
    assert making.wait(10)
    releaser.start()
    watch.stop()
    starter.join()
    assert not any(thread.name == "worker watch" for thread in threading.enumerate())
