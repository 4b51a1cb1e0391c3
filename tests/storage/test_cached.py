"""Copies of objects: made once per host, whole or not at all, anew for another content."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import StorageError
from megazero.storage.cached import Cache
from megazero.storage.objects import MissingObjectError
from tests.storage.small_server import Answer, SmallServer


def test_a_path_stays_as_it_is(tmp_path: Path):
    cache = Cache(str(tmp_path / "cache"))
    assert cache.file("/data/x") == "/data/x"
    assert cache.model_folder("models/x") == "models/x"
    assert not (tmp_path / "cache").exists()


def test_an_object_is_copied_once_by_all_who_ask_at_once(store: SmallServer, tmp_path: Path):
    store.put("bucket/t/vocab.txt", b"one\ntwo\n")
    cache = Cache(str(tmp_path / "cache"))
    with ThreadPoolExecutor(6) as pool:
        paths = set(pool.map(lambda _: cache.file("s3://bucket/t/vocab.txt"), range(12)))
    assert [Path(path).read_bytes() for path in paths] == [b"one\ntwo\n"]
    assert store.requests["GET"] == 1
    assert sorted(path.name for path in Path(*paths).parent.iterdir()) == [".vocab.txt.lock", "vocab.txt"]


def test_another_content_is_another_copy(store: SmallServer, tmp_path: Path):
    cache, url = Cache(str(tmp_path / "cache")), "s3://bucket/t/vocab.txt"
    store.put("bucket/t/vocab.txt", b"one\n")
    first = cache.file(url)
    store.put("bucket/t/vocab.txt", b"two\n")
    second = cache.file(url)
    assert (Path(first).read_bytes(), Path(second).read_bytes()) == (b"one\n", b"two\n")


def test_a_copy_is_whole_or_not_there(store: SmallServer, tmp_path: Path):
    """A process is killed in the middle of a copy; the next one begins anew."""
    store.put("bucket/big.json", content := os.urandom(1 << 20))
    holding, go_on = threading.Event(), threading.Event()

    def wait(request: str) -> None:
        if request.startswith("GET"):
            holding.set()
            go_on.wait(20)

    store.before = wait
    code = "from megazero.storage.cached import Cache; Cache('%s').file('s3://bucket/big.json')"
    child = subprocess.Popen([sys.executable, "-c", code % tmp_path], env={**os.environ, **store.environment})
    assert holding.wait(20)
    (part,) = tmp_path.glob("files/*/.big.json.lock")
    part.with_name(".big.json.part").write_bytes(content[:1000])
    child.kill()
    child.wait()
    go_on.set()
    assert Path(Cache(str(tmp_path)).file("s3://bucket/big.json")).read_bytes() == content
    assert not list(tmp_path.glob("files/*/*.part"))


def test_an_object_that_changes_under_the_copy_is_refused(store: SmallServer, tmp_path: Path):
    store.put("bucket/x.json", b"old")

    def replace(request: str) -> None:
        if request.startswith("GET"):
            store.put("bucket/x.json", b"new and longer")

    store.before = replace
    sentence = "`s3://bucket/x.json` must stay as it is while it is copied, but was replaced; try again."
    with pytest.raises(StorageError, match=re.escape(sentence)):
        Cache(str(tmp_path)).file("s3://bucket/x.json")
    assert [path.name for path in tmp_path.glob("files/*/*")] == [".x.json.lock"]


def test_a_folder_without_permission_is_named(store: SmallServer, tmp_path: Path):
    store.put("bucket/x.json", b"old")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match="`--object-storage-cache-path` must be a folder that can"):
        Cache(str(tmp_path / "cache")).file("s3://bucket/x.json")


def test_a_folder_of_a_model_is_copied_without_what_is_not_read(store: SmallServer, tmp_path: Path):
    names = ("config.json", "tokenizer.model", "model.safetensors", "pytorch_model.bin", "onnx/model.json")
    for name in names:
        store.put(f"bucket/models/m/{name}", name.encode())
    cache = Cache(str(tmp_path))
    folder = Path(cache.model_folder("s3://bucket/models/m"))
    seen = sorted(path.name for path in folder.glob("[!.]*"))
    assert seen == ["config.json", "tokenizer.model"]
    assert cache.model_folder("s3://bucket/models/m", weights=True) == str(folder)
    assert (folder / "model.safetensors").read_bytes() == b"model.safetensors"
    with pytest.raises(MissingObjectError, match="`s3://bucket/models/n` must be an object, or a"):
        cache.model_folder("s3://bucket/models/n")


def test_a_tokenizer_is_read_from_a_url(store: SmallServer, tmp_path: Path):
    store.put("bucket/bert/vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n")
    spec = TokenizerSpec("BertWordPieceLowerCase", vocab_file="s3://bucket/bert/vocab.txt")
    assert build_tokenizer(spec, Cache(str(tmp_path))).encode("hello world") == [5, 6]


def test_a_failing_store_is_asked_again(store: SmallServer, tmp_path: Path):
    store.put("bucket/x.json", b"content")
    answers = [Answer.error(503, "SlowDown"), Answer.error(500, "InternalError")]
    store.before = lambda request: answers.pop() if answers else None
    assert Path(Cache(str(tmp_path)).file("s3://bucket/x.json")).read_bytes() == b"content"
    assert answers == []
