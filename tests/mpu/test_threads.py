"""Helper threads have the CUDA device of the thread that makes them: there are stand-ins for CUDA here."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from megazero.mpu.threads import helper_pool, helper_thread
from megazero.mpu.watch.watch import Watch, WatchLimits
from megazero.train.step.feed import ReadAhead
from tests.mpu.test_watch import Notes, Spared

PACKAGE = Path(__file__).parents[2] / "megazero"


@pytest.fixture
def devices(monkeypatch) -> dict[str, int]:
    """CUDA with device 3 current here: by thread, the device that it has chosen."""
    chosen: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.update({threading.current_thread().name: device})
    )
    return chosen


def test_each_thread_of_a_pool_takes_the_device_before_its_first_work(devices):
    pool = helper_pool(2, "writer")
    name = pool.submit(lambda: (threading.current_thread().name, dict(devices))).result()
    assert name == ("writer_0", {"writer_0": 3})
    pool.shutdown()


def test_a_thread_takes_the_device_before_its_work(devices):
    seen = []
    thread = helper_thread(lambda: seen.append(dict(devices)), "watcher")
    assert thread.daemon
    thread.start()
    thread.join()
    assert seen == [{"watcher": 3}]


def test_the_watch_has_the_device_of_its_rank(devices):
    watch = Watch(Notes(), 1, 2, WatchLimits(20.0), Spared())
    watch.close()
    assert devices == {"_watch_calls": 3, "_watch_notes": 3}


def test_reading_ahead_has_the_device_of_its_rank(devices):
    ahead = ReadAhead(lambda start: {}, 1)
    ahead.expect(0, 1)
    ahead.take(0)
    assert devices == {"read-ahead_0": 3}


def test_without_cuda_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("CUDA was asked"))
    assert helper_pool(1, "pool").submit(lambda: 7).result() == 7


def test_every_thread_of_the_package_is_made_here():
    """But what only talks to other hosts and processes, and what reads files and no tensors."""
    talking = ("launch/", "env/", "data_tools/", "report/", "storage/", "checkpoint/remote/")
    made = re.compile(r"ThreadPoolExecutor\(|threading\.(Thread|Timer)\(|[^.\w]Thread\(")
    places = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if made.search(line) and not line.startswith("class ")
    }
    assert {place for place in places if not place.startswith(talking)} == {"mpu/threads.py"}
