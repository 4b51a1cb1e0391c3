"""Runs that end before their time: what they leave, and what becomes of their workers."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.data_tools.preprocess_data import main
from megazero.data_tools.preprocessing import pipeline
from tests.data_tools.conftest import BYTES, NULL, visible, write_jsonl
from tests.data_tools.preprocessing import acting_after, read_documents

SCRIPT = Path(__file__).resolve().parents[2] / "data_tools" / "preprocess_data.py"


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        (
            lambda: os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL),
            1,
            "ended by signal SIGKILL",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143, "terminated"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130, "interrupted"),
    ],
)
def test_killed_worker_or_stopped_run_leaves_nothing(tmp_path, out, capsys, monkeypatch, act, status, words):
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "1 2 3"}] * 500)
    monkeypatch.setattr(pipeline, "cut", acting_after(6, act))
    assert main(["--input", path, "--output-prefix", str(out / "p"), "--workers", "2", *NULL]) == status
    assert words in capsys.readouterr().err
    assert visible(out) == []
    assert multiprocessing.active_children() == []


def test_stopped_run_leaves_an_older_dataset_as_it_was(tmp_path, out, monkeypatch):
    old = write_jsonl(tmp_path / "old.jsonl", [{"text": "7"}])
    new = write_jsonl(tmp_path / "new.jsonl", [{"text": "1 2 3"}] * 500)
    assert main(["--input", old, "--output-prefix", str(out / "p"), *NULL]) == 0
    monkeypatch.setattr(pipeline, "cut", acting_after(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert main(["--input", new, "--output-prefix", str(out / "p"), *NULL]) == 143
    assert read_documents(str(out / "p_text_document")) == [[[7]]]


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path, out):
    """A limit on the file size stands in for the disk: the write in the middle of the run fails."""
    path = write_jsonl(tmp_path / "f.jsonl", [{"text": "x" * 1000}] * 400)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, str(SCRIPT), "--input", path, "--output-prefix", str(out / "p"), *BYTES]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert visible(out) == []


@pytest.mark.parametrize("threads", [0, 1])
def test_orphaned_workers_leave(tmp_path, threads):
    """SIGKILL gives the parent no chance to end its workers; they must see its pipe close, whether forked
    or, as the parent has threads, spawned."""
    code = (
        "import threading, time\n"
        "from megazero.data_tools.preprocessing.encode import EncodeJob\n"
        "from megazero.data_tools.preprocessing.pool import WorkerPool\n"
        "from megazero.data.tokenizers.build import TokenizerSpec\n"
        "if __name__ == '__main__':\n"
        f"    for _ in range({threads}):\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "    pool = WorkerPool(EncodeJob(TokenizerSpec('ByteLevelTokenizer'), ('text',)), 2)\n"
        "    print(*[worker.process.pid for worker in pool._workers], flush=True)\n"
        "    time.sleep(60)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        # The workers share the parent's standard output: it ends when the last of them has left.
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
        assert len(pids) == 2
        parent.stdout.read()
