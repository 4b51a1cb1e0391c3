"""What the real servers do, by which the tests of checkpoints and tokens there are to be read."""

from __future__ import annotations

import pytest

from megazero.errors import StorageError
from megazero.storage.objects import LostRaceError, Objects
from megazero.storage.urls import Url
from tests.storage.proxy import Faults, FaultyProxy
from tests.storage.servers import Server
from tests.storage.small_server import SmallServer, environment


def _objects(key: str) -> Objects:
    return Objects(Url.parse(f"s3://bucket/{key}"))


@pytest.mark.slow
def test_seaweed_keeps_conditions(seaweed: Server):
    objects = _objects("conditions")
    tag = objects.create("x", b"one")
    with pytest.raises(LostRaceError):
        objects.create("x", b"two")
    objects.swap("x", b"three", tag)
    with pytest.raises(LostRaceError):
        objects.swap("x", b"four", tag)
    assert objects.read("x")[0] == b"three"
    assert [item.name for item in objects.names()] == ["x"]


@pytest.mark.slow
def test_seaweed_refuses_other_keys(seaweed: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(StorageError, match="must be within reach, but access is denied") as error:
        _objects("conditions").read("x")
    assert "another" not in str(error.value)


@pytest.mark.slow
def test_rclone_ignores_conditions(rclone: Server):
    objects = _objects("conditions")
    tag = objects.create("x", b"one")
    assert objects.create("x", b"two two")
    assert objects.swap("x", b"three", tag)
    assert objects.read("x")[0] == b"three"


def _spoiled(store: SmallServer, monkeypatch: pytest.MonkeyPatch, seed: int) -> tuple[dict[str, int], int]:
    """Five reads through faults of a seed: which faults there were, and the requests that arrived."""
    store.put("bucket/run/x", content := bytes(range(256)) * 100)
    with FaultyProxy(store.endpoint, seed, Faults(error=0.1, slow_down=0.1, cut=0.1, lost=0.1)) as proxy:
        for name, value in environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        objects, before = _objects("run"), store.requests["GET"]
        for _ in range(5):
            assert objects.read("x")[0] == content
        return dict(proxy.happened), store.requests["GET"] - before


def test_faults_come_back_by_their_seed_and_are_repeated_away(
    store: SmallServer, monkeypatch: pytest.MonkeyPatch
):
    first = _spoiled(store, monkeypatch, seed=4)
    assert first == _spoiled(store, monkeypatch, seed=4)
    assert first[0][""] >= 5
    assert sum(first[0].values()) > 5
