from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megazero.data.tokenizers.build import TokenizerSpec
from megazero.data.tokenizers.fast import FastChoice
from megazero.data_tools.preprocessing import encode, pipeline, pool
from megazero.data_tools.preprocessing.chunks import cut
from megazero.data_tools.preprocessing.encode import ChunkEncoder, EncodeJob
from megazero.data_tools.preprocessing.pipeline import PreprocessRun, Workers, preprocess
from megazero.data_tools.preprocessing.pool import WorkerPool, can_fork
from megazero.errors import DataError
from tests.data_tools.conftest import NULL, visible, write_jsonl

SCRIPT = Path(__file__).resolve().parents[2] / "data_tools" / "preprocess_data.py"
JOB = EncodeJob(TokenizerSpec("NullTokenizer", vocab_size=1000), ("text",), append_eod=True)

linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@linux
def test_only_a_process_without_threads_is_forked():
    stop = threading.Event()
    assert can_fork()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not can_fork()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("fork", [pytest.param(True, marks=linux), False])
@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_and_whole_however_workers_start(tmp_path, monkeypatch, fork, workers):
    """Among them chunks without a document, and one with more tokens than a slot holds."""
    monkeypatch.setattr(pool, "can_fork", lambda: fork)
    rows = [{"text": f"{i} {i + 1}"} for i in range(200)] + [b""] * 50 + [{"text": "7 " * 5000}]
    path = write_jsonl(tmp_path / "f.jsonl", [*rows, {"text": ["1", "2"]}])
    alone = ChunkEncoder(JOB)
    count = 0
    with WorkerPool(JOB, workers, chunk_bytes=100) as workers_pool:
        assert workers_pool.facts == alone.facts
        chunks = list(cut([path], 100))
        for chunk, result in zip(chunks, workers_pool.results(chunks), strict=True):
            expected = alone(chunk)
            assert (result.path, result.lines, result.bytes) == (path, expected.lines, expected.bytes)
            for got, want in zip(result.columns, expected.columns, strict=True):
                assert got.tokens.dtype == want.tokens.dtype
                assert np.array_equal(got.tokens, want.tokens)
                assert np.array_equal(got.lengths, want.lengths)
                assert (got.documents, got.empty) == (want.documents, want.empty)
            count += len(result.columns[0].tokens)
    assert count == 200 * 3 + 5001 + 3
    assert multiprocessing.active_children() == []


@linux
def test_forked_workers_take_the_parents_tokenizer(tmp_path, monkeypatch):
    parent = os.getpid()
    real = encode.build_tokenizer

    def build(spec):
        assert os.getpid() == parent, "a worker loaded a tokenizer itself"
        return real(spec)

    monkeypatch.setattr(encode, "build_tokenizer", build)
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1 2"}] * 9)
    with WorkerPool(JOB, 3) as workers_pool:
        assert [result.lines for result in workers_pool.results(cut([path], 30))] == [2, 2, 2, 2, 1]


@linux
def test_a_bar_on_a_terminal_does_not_keep_workers_from_being_forked(tmp_path, out, monkeypatch, bpe):
    """Its thread starts after them, also in the second attempt after a wrong fast encoder."""

    class Wrong:
        name = "quickfox"

        def encode_batch(self, texts):
            raise ValueError("cannot")

    asked = []
    monkeypatch.setattr(pool, "can_fork", lambda: asked.append(can_fork()) or asked[-1])
    monkeypatch.setattr(encode, "try_fast", lambda tokenizer: FastChoice(Wrong(), None))
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    drawing = []
    real = pipeline.ProgressDisplay.show
    monkeypatch.setattr(
        pipeline.ProgressDisplay, "show", lambda *a: drawing.append(threading.active_count()) or real(*a)
    )
    spec = TokenizerSpec(bpe[1], bpe[3], bpe[5])
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "the fox"}] * 50)
    job = EncodeJob(spec, ("text",))
    outcome = preprocess(PreprocessRun((path,), str(out / "p"), job, Workers(2), chunk_bytes=100))
    assert outcome.totals.keys["text"].documents == 50
    assert outcome.encoder == "GPT2BPETokenizer"
    assert "starting again" in terminal.getvalue()
    assert asked[0] is True
    assert len(asked) == 2
    assert set(drawing) == {3}  # this one, the bar's and that of the watch


@pytest.mark.parametrize("fork", [pytest.param(True, marks=linux), False])
def test_killed_worker_is_named_however_workers_start(tmp_path, monkeypatch, fork):
    monkeypatch.setattr(pool, "can_fork", lambda: fork)
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1 2"}] * 500)
    with WorkerPool(JOB, 2) as workers_pool:
        victim = next(p for p in multiprocessing.active_children() if p.name == "preprocess-1")
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(DataError, match="worker 1 .* ended by signal SIGKILL"):
            list(workers_pool.results(cut([path], 50)))
    assert multiprocessing.active_children() == []


@linux
@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_the_run_without_a_word_from_workers(tmp_path, out, stop, threads):
    """Ctrl-C in a terminal, or a scheduler's SIGTERM, reaches the workers too."""
    code = (
        "import sys, threading, time\n"
        f"sys.path.insert(0, {str(SCRIPT.parents[1])!r})\n"
        "from megazero.data_tools.preprocess_data import main\n"
        "if __name__ == '__main__':\n"
        f"    for _ in range({threads}):\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    script = tmp_path / "run.py"
    script.write_text(code)
    path = tmp_path / "f.jsonl"
    path.write_bytes(
        b'{"text": "1 2 3"}\n' * 3_000_000
    )  # seconds of work; the signal comes after the first chunk
    flags = ["--input", str(path), "--output-prefix", str(out / "p"), "--workers", "2", *NULL]
    with subprocess.Popen(
        [sys.executable, str(script), *flags, "--log-interval", "1"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert "documents" in run.stderr.readline()
        os.killpg(run.pid, stop)
        rest = [line for line in run.stderr.read().splitlines() if "documents, " not in line]
    words = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[stop]
    assert rest == [f"error: {words}; nothing was left behind."]
    assert run.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[stop]
    assert visible(out) == []


@linux
def test_a_held_up_worker_does_not_hold_up_the_rest_nor_change_the_order(tmp_path, monkeypatch):
    """While the first chunk is in work the other worker takes on as many as its slots can hold."""
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": f"{i}"} for i in range(40)])
    chunks = list(cut([path], 1))
    begun = tmp_path / "begun"
    begun.mkdir()
    go = tmp_path / "go"
    deadline = time.monotonic() + 30
    real = ChunkEncoder.__call__

    def encode_when_told(self, chunk):
        (begun / str(chunk.number)).touch()
        while chunk.number == 0 and not go.exists():
            assert time.monotonic() < deadline, "the other worker was held up too"
            time.sleep(0.001)
        return real(self, chunk)

    monkeypatch.setattr(ChunkEncoder, "__call__", encode_when_told)
    taken = []

    def taking():
        for chunk in chunks:
            taken.append(chunk.number)
            if (
                len(taken) == 1 + pool._AHEAD + 1
            ):  # the first, its successor in the queue, a full other worker
                go.touch()
            yield chunk

    with WorkerPool(JOB, 2) as workers_pool:
        first = [int(result.columns[0].tokens[0]) for result in workers_pool.results(taking())]
    assert first == list(range(40))
    assert len(visible(begun)) == 40


def test_an_error_comes_in_its_turn(tmp_path):
    """Not when it arrives: which of two errors ends a run must not depend on which worker was quicker."""
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": f"{i}"} for i in range(10)])
    chunks = list(cut([path], 1))
    chunks[7] = replace(chunks[7], path=str(tmp_path / "gone"))
    with WorkerPool(JOB, 3) as workers_pool:
        results = workers_pool.results(chunks)
        seen = [int(next(results).columns[0].tokens[0]) for _ in range(7)]
        with pytest.raises(FileNotFoundError):
            next(results)
    assert seen == [0, 1, 2, 3, 4, 5, 6]
