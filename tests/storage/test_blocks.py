"""Blocks of an object: fetched when they are used, kept within bounds, checked, shared by processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megazero.errors import DataError, StorageError
from megazero.storage import blocks
from megazero.storage.blocks import ObjectBlocks
from megazero.storage.cached import Cache
from megazero.storage.objects import Objects
from megazero.storage.urls import Url
from tests.storage.small_server import SmallServer

KIB = 1 << 10
BLOCK = 64 * KIB
CONTENT = np.random.default_rng(5).integers(0, 256, 40 * BLOCK + 1000, dtype=np.uint8).tobytes()


def _opened(store: SmallServer, folder: Path, kib: int = 1 << 20) -> ObjectBlocks:
    if "bucket/x" not in store.objects:
        store.put("bucket/x", CONTENT)
    objects = Objects(Url.parse("s3://bucket"))
    return ObjectBlocks(objects, objects.item("x"), Cache(str(folder), kib / (1 << 20)), BLOCK)


def _read(opened: ObjectBlocks, *spans: tuple[int, int]) -> list[bytes]:
    begins, ends = (np.array(side) for side in zip(*spans, strict=True))
    with opened.using(lambda: (begins, ends)):
        return [opened.array[begin:end].tobytes() for begin, end in spans]


def _taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("blocks/*/content"))


def test_only_what_is_used_is_fetched_and_once(store: SmallServer, tmp_path: Path):
    opened = _opened(store, tmp_path)
    spans = [(10, 20), (BLOCK - 1, BLOCK + 1), (7 * BLOCK, 7 * BLOCK), (len(CONTENT) - 5, len(CONTENT))]
    assert _read(opened, *spans) == [CONTENT[begin:end] for begin, end in spans]
    assert (store.requests["GET"], store.sent) == (2, 2 * BLOCK + 1000)
    _read(opened, *spans)
    _read(_opened(store, tmp_path), *spans)
    assert store.requests["GET"] == 2


def test_all_in_order_reads_each_byte_once(store: SmallServer, tmp_path: Path):
    opened = _opened(store, tmp_path)
    assert b"".join(_read(opened, (0, len(CONTENT)))) == CONTENT
    assert store.sent == len(CONTENT)
    # When all is there, nobody asks where the tokens are.
    with opened.using(lambda: pytest.fail("asked")):
        assert opened.array.tobytes() == CONTENT


def test_the_cache_keeps_within_its_bound_and_gives_up_what_was_used_least_recently(
    store: SmallServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    opened = _opened(store, tmp_path, kib=10 * 64)
    for number in range(40):
        now[0] += 1
        begin = number * BLOCK
        assert _read(opened, (begin, begin + 9), (0, 9)) == [CONTENT[begin : begin + 9], CONTENT[:9]]
        assert _taken(tmp_path) <= 10 * BLOCK
    assert store.requests["GET"] == 40  # block 0 was used all the time


def test_what_does_not_fit_at_once_is_refused(store: SmallServer, tmp_path: Path):
    opened = _opened(store, tmp_path, kib=3 * 64)
    with pytest.raises(StorageError, match="`--object-storage-cache-gib` must hold what the ranks of a host"):
        _read(opened, (0, 8 * BLOCK))


def test_threads_and_evictions_never_give_a_wrong_byte(store: SmallServer, tmp_path: Path):
    """Five threads and two openers read at random in a cache for a fifth of the object."""
    openers = [_opened(store, tmp_path, kib=8 * 64) for _ in range(2)]

    def read(seed: int) -> None:
        stream = np.random.default_rng(seed)
        for _ in range(25):
            begin = int(stream.integers(0, len(CONTENT) - 100))
            assert _read(openers[seed % 2], (begin, begin + 100)) == [CONTENT[begin : begin + 100]]

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(read, range(5)))


def test_a_damaged_block_of_the_cache_is_fetched_again(store: SmallServer, tmp_path: Path):
    _read(_opened(store, tmp_path), (0, 3 * BLOCK))
    (content,) = tmp_path.glob("blocks/*/content")
    with open(content, "r+b") as file:
        file.seek(BLOCK + 5)
        file.write(b"damage")
    before = store.sent
    assert _read(_opened(store, tmp_path), (0, 3 * BLOCK)) == [CONTENT[: 3 * BLOCK]]
    assert store.sent - before == BLOCK


def test_a_replaced_object_is_named(store: SmallServer, tmp_path: Path):
    opened = _opened(store, tmp_path)
    _read(opened, (0, 10))
    assert not opened.replaced()
    store.put("bucket/x", CONTENT[::-1])
    assert opened.replaced()
    assert _read(opened, (0, 10)) == [CONTENT[:10]]
    sentence = "`s3://bucket/x` must stay as it is while it is trained on, but was replaced"
    with pytest.raises(DataError, match=re.escape(sentence)):
        _read(opened, (5 * BLOCK, 5 * BLOCK + 10))


def test_a_full_disk_is_named(store: SmallServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = _opened(store, tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="must be a folder .* cannot .No space left on device.; make room"):
        _read(opened, (0, 10))


def test_a_fetch_that_was_killed_is_done_by_another(
    store: SmallServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The killed process has claimed the block; its claim counts for a minute, of which nobody waits here."""
    opened = _opened(store, tmp_path)
    now = [1000.0]
    opened._table.claims[:] = 1000
    clock = SimpleNamespace(time=lambda: now[0], sleep=lambda _: now.append(now.pop() + 1))
    monkeypatch.setattr(blocks, "time", clock)
    assert _read(opened, (0, 10)) == [CONTENT[:10]]
    assert now == [1061.0]


_CHILD = """
import sys, numpy as np
from pathlib import Path
from types import SimpleNamespace
from megazero.storage.blocks import ObjectBlocks
from megazero.storage.cached import Cache
from megazero.storage.objects import Objects
from megazero.storage.urls import Url
folder, seed = sys.argv[1], int(sys.argv[2])
objects = Objects(Url.parse("s3://bucket"))
opened = ObjectBlocks(objects, objects.item("x"), Cache(folder, 8 * 64 / (1 << 20)), 64 << 10)
content = np.random.default_rng(5).integers(0, 256, 40 * (64 << 10) + 1000, dtype=np.uint8)
stream = np.random.default_rng(seed)
print("on", flush=True)
while True:
    begin = int(stream.integers(0, content.size - 3000))
    with opened.using(lambda: (np.array([begin]), np.array([begin + 3000]))):
        if (opened.array[begin : begin + 3000] != content[begin : begin + 3000]).any():
            print("wrong", flush=True)
"""


@pytest.mark.slow
def test_processes_that_are_killed_leave_no_wrong_byte(store: SmallServer, tmp_path: Path):
    """Two processes read through a small cache; again and again one is killed and another starts."""
    store.put("bucket/x", CONTENT)
    children: list[subprocess.Popen[str]] = []
    stream = np.random.default_rng(1)
    for seed in range(25):
        command = [sys.executable, "-c", _CHILD, str(tmp_path), str(seed)]
        children.append(
            subprocess.Popen(
                command, env={**os.environ, **store.environment}, stdout=subprocess.PIPE, text=True
            )
        )
        assert children[-1].stdout is not None
        assert children[-1].stdout.readline() == "on\n"
        time.sleep(float(stream.uniform(0.05, 0.6)))
        if len(children) > 2:
            victim = children.pop(int(stream.integers(0, 3)))
            victim.kill()
            assert "wrong" not in victim.communicate()[0]
    opened = _opened(store, tmp_path, kib=8 * 64)
    for begin in range(0, len(CONTENT) - BLOCK, BLOCK):
        assert _read(opened, (begin, begin + BLOCK)) == [CONTENT[begin : begin + BLOCK]]
    for child in children:
        child.kill()
        assert "wrong" not in child.communicate()[0]
    assert threading.active_count() < 60
