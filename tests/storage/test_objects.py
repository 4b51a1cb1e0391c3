"""Objects of a store: read, listed, written so that races are noticed, and errors of one sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megazero.errors import StorageError
from megazero.storage.objects import LostRaceError, MissingObjectError, Objects
from megazero.storage.urls import Url, is_url
from tests.storage.small_server import Answer, SmallServer


def _objects(key: str = "run") -> Objects:
    return Objects(Url.parse(f"s3://bucket/{key}".rstrip("/")))


def test_what_is_put_is_read_and_listed(store: SmallServer, tmp_path: Path):
    objects = _objects()
    store.page = 2
    tags = {name: objects.put(name, name.encode() * 3) for name in ("a", "b", "c/d", "c/e", "cc/f")}
    assert store.content("bucket/run/c/d") == b"c/dc/dc/d"
    assert objects.read("b") == (b"bbb", tags["b"])
    assert (objects.item("c/d").size, objects.tag("c/d")) == (9, tags["c/d"])
    assert [(item.name, item.size) for item in objects.names()] == [
        *(("a", 3), ("b", 3), ("c/d", 9), ("c/e", 9), ("cc/f", 12))
    ]
    assert [item.name for item in objects.names("c")] == ["c/d", "c/e"]
    objects.download("c/e", tmp_path / "e")
    assert (tmp_path / "e").read_bytes() == b"c/ec/ec/e"
    objects.delete(["a", "b", "never"])
    assert sorted(store.objects) == ["bucket/run/c/d", "bucket/run/c/e", "bucket/run/cc/f"]


def test_near_ranges_are_one_request(store: SmallServer):
    store.put("bucket/run/x", content := bytes(range(256)) * 40)
    pieces = _objects().ranges("x", [0, 100, 5000], [10, 110, 6000])
    assert [bytes(piece) for piece in pieces] == [content[:10], content[100:110], content[5000:6000]]
    assert store.requests["GET"] == 1
    with pytest.raises(StorageError, match="`s3://bucket/run/x` must have 10250 bytes, but is shorter"):
        _objects().ranges("x", [10230], [10250])


def test_a_big_object_is_whole_or_not_there(store: SmallServer, tmp_path: Path):
    (tmp_path / "big").write_bytes(content := bytes(range(251)) * 60000)
    _objects().put("big", tmp_path / "big")
    assert store.content("bucket/run/big") == content
    assert store.requests["PARTS"] >= 4
    assert store.uploads == {}


def test_a_race_has_one_winner(store: SmallServer):
    objects = _objects()
    tag = objects.create("latest", b"one")
    with pytest.raises(LostRaceError, match="`s3://bucket/run/latest` must be written by one run"):
        objects.create("latest", b"two")
    assert objects.swap("latest", b"three", tag) == objects.tag("latest")
    with pytest.raises(LostRaceError):
        objects.swap("latest", b"four", tag)
    with pytest.raises(LostRaceError):
        objects.swap("gone", b"four", tag)
    assert store.content("bucket/run/latest") == b"three"


def test_a_lost_answer_is_no_lost_race(store: SmallServer):
    lost = [Answer.error(500, "InternalError")]
    store.after = lambda request: lost.pop() if request.startswith("PUT") and lost else None
    objects = _objects()
    tag = objects.create("latest", b"mine")
    assert store.requests["PUT"] == 2
    lost.append(Answer.error(500, "InternalError"))
    assert objects.swap("latest", b"mine too", tag) == objects.tag("latest")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda store: store.refused_keys.add("testkey"), "`s3://bucket/run/x` must be within reach, but "),
        (
            lambda store: store.buckets.clear(),
            "`s3://bucket/run/x` must be in a bucket that exists, but bucket does not; create it.",
        ),
        (lambda store: None, "`s3://bucket/run/x` must be within reach, but there is no such object"),
    ],
)
def test_errors_are_a_sentence_without_secrets(
    store: SmallServer, spoil: Callable[[SmallServer], None], sentence: str
):
    spoil(store)
    with pytest.raises(StorageError, match=re.escape(sentence)) as error:
        _objects().read("x")
    assert "\n" not in str(error.value)
    assert "testkey" not in str(error.value)
    assert "testsecret" not in str(error.value)


def test_a_missing_object_is_told_apart(store: SmallServer):
    with pytest.raises(MissingObjectError):
        _objects().tag("x")


def test_a_profile_of_multi_storage_client_is_read(store: SmallServer, monkeypatch: pytest.MonkeyPatch):
    store.put("bucket/base/run/x", b"content")
    for name in store.environment:
        monkeypatch.delenv(name)
    provider = {"endpoint_url": store.endpoint, "base_path": "bucket/base", "region_name": "us-east-1"}
    profile = {
        "storage_provider": {"type": "s3", "options": provider},
        "credentials_provider": {"type": "S3Credentials", "options": {"access_key": "a", "secret_key": "b"}},
    }
    kind = SimpleNamespace(read_msc_config=lambda: ({"profiles": {"p": profile}}, "config.yaml"))
    monkeypatch.setitem(sys.modules, "multistorageclient", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "multistorageclient.config", SimpleNamespace(StorageClientConfig=kind))
    assert Objects(Url.parse("msc://p/run")).read("x")[0] == b"content"
    with pytest.raises(StorageError, match="`msc://q/run` must name a profile of multi-storage-client"):
        Objects(Url.parse("msc://q/run"))


def test_without_multi_storage_client_its_urls_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "multistorageclient.config", None)
    with pytest.raises(StorageError, match="run: pip install multi-storage-client$"):
        Objects(Url.parse("msc://p/run"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("s4://bucket/x", "`URL` must begin with s3://, .* but is s4://bucket/x; did you mean s3://?"),
        ("s3://key:secret@bucket/x", "`URL` must have no keys or passwords in it, but s3://...@bucket/x has"),
        ("https://host/x?sig=secret", "`URL` must have no keys or passwords in it, but https://host/x has"),
        ("s3:///x", "`URL` must name a bucket, but is s3:///x"),
    ],
)
def test_a_wrong_url_is_refused(text: str, sentence: str):
    assert is_url(text)
    with pytest.raises(StorageError, match=sentence.replace("?", r"\?")):
        Url.parse(text)


def test_a_store_with_versions_is_asked_by_them(monkeypatch: pytest.MonkeyPatch):
    """Google Cloud Storage compares generations and not e-tags."""
    import obstore
    from obstore.store import MemoryStore

    asked = []

    def put(store: object, name: str, content: bytes, mode: object = None) -> dict[str, str]:
        asked.append(mode)
        return {"e_tag": "e", "version": f"{len(asked)}"}

    monkeypatch.setattr(obstore, "put", put)
    objects = Objects(Url.parse("gs://bucket/run"), MemoryStore())
    tag = objects.swap("latest", b"2", objects.create("latest", b"1"))
    assert tag == objects.swap("latest", b"2", "e").replace("3", "2")
    assert asked == ["create", {"e_tag": "e", "version": "1"}, {"e_tag": "e"}]


def test_keys_that_are_refused_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    """The library calls it a general error, and tries again in vain."""
    import obstore
    from obstore.exceptions import GenericError
    from obstore.store import MemoryStore

    def head(store: object, name: str) -> None:
        raise GenericError(
            "Error performing PUT in 3s - Server returned non-2xx status code: 403 Forbidden: "
        )

    monkeypatch.setattr(obstore, "head", head)
    with pytest.raises(StorageError, match=r"access is denied \(403 Forbidden\); check the keys"):
        Objects(Url.parse("s3://bucket/run"), MemoryStore()).item("a")
