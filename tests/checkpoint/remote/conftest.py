"""Hosts with mirrors of their own, and a store in memory that s3:// means."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.checkpoint.remote import mirror
from tests.checkpoint.remote.memory import MemoryObjects, Store
from tests.storage.conftest import bad_server, good_server, rclone, seaweed, store  # noqa: F401


@pytest.fixture
def another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """A function that makes this process one on a host without a mirror; returns its cache."""
    numbers = itertools.count()

    def move() -> Path:
        cache = tmp_path / f"host{next(numbers)}"
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        return cache

    move()
    return move


@pytest.fixture
def memory(another_host: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store in memory, which all URLs mean."""
    there = Store()
    monkeypatch.setattr(mirror, "PatientObjects", lambda url: MemoryObjects(url, there))
    monkeypatch.setattr(mirror.os, "fsync", lambda descriptor: None)
    return there
