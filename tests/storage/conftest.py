"""Stores for tests: a small one in memory, SeaweedFS and rclone's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage import servers
from tests.storage.small_server import SmallServer


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallServer]:
    """A small server with the bucket `bucket`, which s3:// means in this test."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'megazero[objects]'")
    with SmallServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def good_server() -> Iterator[servers.Server]:
    """SeaweedFS, started once."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'megazero[objects]'")
    with servers.seaweed() as server:
        yield server


@pytest.fixture(scope="session")
def bad_server() -> Iterator[servers.Server]:
    """rclone's server, which ignores conditions, started once."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'megazero[objects]'")
    with servers.rclone() as server:
        yield server


@pytest.fixture
def seaweed(good_server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> servers.Server:
    """SeaweedFS, which s3:// means in this test; other tests' objects may be there."""
    for name, value in good_server.environment.items():
        monkeypatch.setenv(name, value)
    return good_server


@pytest.fixture
def rclone(bad_server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> servers.Server:
    """rclone's server, which s3:// means in this test; other tests' objects may be there."""
    for name, value in bad_server.environment.items():
        monkeypatch.setenv(name, value)
    return bad_server
