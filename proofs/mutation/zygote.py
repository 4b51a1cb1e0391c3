"""A process that has imported pytest and what its command line names, and forks a child for each test run.

It is started in a copy of the project with that copy on `PYTHONPATH`, reads requests from standard input and
answers on standard output, one JSON object per line. A child imports megazero afresh, so it sees whatever
fault the copy holds. A child that outlasts its limit is ended, and with it every process it left.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from _pytest.config import default_plugins

DIE_WITH_PARENT = 1  # prctl: the signal this process gets when its parent ends
BECOME_SUBREAPER = 36  # prctl: orphans of children become children of this process
MEMORY = 8 << 30  # bytes a test process may allocate
FILE_SIZE = 32 << 30  # and of one file; some tests make large ones with holes


class Recorder:
    """A pytest plugin: runs the wanted tests in the wanted order; notes times, hits and the first failure."""

    def __init__(self, wanted: list[str] | None, board):
        self.wanted = None if wanted is None else {name: i for i, name in enumerate(wanted)}
        self.board = board
        self.tests: dict[str, dict] = {}
        self.failed: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.wanted is not None:
            items[:] = sorted(
                (item for item in items if item.nodeid in self.wanted),
                key=lambda item: self.wanted[item.nodeid],
            )
        if self.board is not None:
            self.board.next_test()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        start = time.perf_counter()
        self.tests[item.nodeid] = entry = {"passed": True}
        result = yield
        entry["seconds"] = round(time.perf_counter() - start, 4)
        if self.board is not None:
            entry["hits"] = self.board.next_test()
        return result

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
            self.tests[report.nodeid] |= {"passed": False, "why": report.longreprtext}
        if report.skipped:
            self.tests[report.nodeid]["passed"] = False

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} (collection)"


def run_tests(request: dict, folder: Path) -> int:
    """In the child: run what the request names, and write the report to the folder."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None
    board = None
    if request["hits"]:
        (folder / "hits").mkdir()
        os.environ["MEGAZERO_HITS"] = str(folder / "hits")
        # What the zygote has imported of megazero may have imported it, without a folder.
        board = importlib.reload(importlib.import_module("proofs.mutation.hits")).BOARD
    recorder = Recorder(request["tests"], board)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    options += ["--basetemp", str(folder / "pytest"), *(["-x"] if request["stop"] else [])]
    if request["tests"] is not None and Path("tests/conftest.py").exists():
        options.append("--slow")  # what is wanted runs, of whatever tier it is
    code = int(pytest.main([*options, *request["files"]], plugins=[recorder]))
    answer = {"tests": recorder.tests, "failed": recorder.failed}
    (folder / "report.json").write_text(json.dumps(answer))
    return code


def serve() -> None:
    """Answer requests until standard input ends."""
    ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1)
    plugins = (f"_pytest.{name}" for name in default_plugins)
    for name in (*plugins, *sys.argv[1:]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    work = Path(os.environ["MUTANTS_FOLDER"])
    for line in sys.stdin:
        shutil.rmtree(work, ignore_errors=True)
        (work / "tmp").mkdir(parents=True)
        request = json.loads(line)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
                code = run_tests(request, work)
            finally:
                os._exit(code)
        answer = _wait(child, start + request["limit"])
        report = work / "report.json"
        if report.exists():
            answer |= json.loads(report.read_text())
        answers.write(json.dumps(answer | {"seconds": round(time.monotonic() - start, 2)}) + "\n")
        answers.flush()


def _wait(child: int, deadline: float) -> dict:
    """How the child ended; nothing of it is left afterwards."""
    status = None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(0.02)
    _end_descendants()
    return {"code": status, "timed_out": status is None}


def _end_descendants() -> None:
    while pids := _children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    serve()
