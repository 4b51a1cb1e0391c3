"""What all tests share: one thread per process, the pool of Gloo workers, which tests run in which order."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from megazero.mpu import thread_group
from megazero.zero.store.disk import _OpenFile
from tests.durations import DurationsWriter, read_durations
from tests.pool import WorkerPool
from tests.tiers import FastTier, left_for_slow


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")
    parser.addoption("--all-layouts", action="store_true", help="law 1 on every allowed layout: hours")
    parser.addoption("--fast", action="store_true", help="only what a commit waits for")
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="of the operators' sweep")
    parser.addoption("--write-durations", action="store_true", help="refresh tests/durations.txt")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    _share_out_cores()
    if threading.current_thread() is threading.main_thread():
        # A shell starts background jobs with interrupts ignored, and tests send some.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The same examples every time: a suite that fails must fail again. A busy machine is no failure.
    hypothesis.settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("repeatable")
    with contextlib.suppress(ImportError):
        # Bars of transformers start a thread that stays, and a process with threads is not forked.
        from tqdm import tqdm

        tqdm.monitor_interval = 0
    if config.option.fast:
        config.pluginmanager.register(FastTier())
    if config.option.write_durations and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(DurationsWriter())


def _share_out_cores() -> None:
    """Give each of several test processes a core of its own for ranks that are threads.

    They stay on one core, by default the one that they are started on, and two processes would often choose
    the same one while the other is idle.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker.removeprefix("gw").isdecimal() and hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        core = cores[int(worker.removeprefix("gw")) % len(cores)]
        thread_group.this_core = lambda: core


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (config.option.slow or config.option.all_layouts):
        slow = [item for item in items if item.get_closest_marker("slow")]
        for item in [*slow, *left_for_slow([item for item in items if not item.get_closest_marker("slow")])]:
            item.add_marker(pytest.mark.skip(reason="takes long; run with --slow"))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    # The longest files first: what is left for the end, when one worker may wait for the other, is short.
    seconds = read_durations()
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], float("inf")))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what is imported and collected out of the search for garbage, which then costs little.

    It must not be rarer than usual: steps leave cycles that hold few objects and gigabytes of tensors.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what a file's tests have imported and left, which would be searched again and again."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def products_that_take_no_time():
    """A training begins by timing products for a tenth of a second, as long as many of them train here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megazero.train.observe.host._product_seconds", lambda left, right: 0.02)
        yield


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test(monkeypatch: pytest.MonkeyPatch):
    """A process with threads is not forked by later tests. Those of the files that a test made are ended."""
    before = set(threading.enumerate())
    files: list[_OpenFile] = []
    start = _OpenFile.__init__

    def noted(file: _OpenFile, *arguments: Any) -> None:
        start(file, *arguments)
        files.append(file)

    monkeypatch.setattr(_OpenFile, "__init__", noted)
    yield
    for file in files:
        file._threads.shutdown()
    left = set(threading.enumerate()) - before
    if left:
        gc.collect()  # an executor's threads end with it
    for thread in left:
        thread.join(5.0)
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads outlive their test: {alive}"


@pytest.fixture(scope="session")
def pool():
    """The session's pool of Gloo workers."""
    workers = WorkerPool()
    yield workers
    workers.close()
