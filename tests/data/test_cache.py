from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megazero.data.cache import cache_key, cached_arrays
from tests.tables import over_table

DESCRIPTION = {"dataset": "abc", "seed": 1}


class Builder:
    """Builds two arrays and counts how often."""

    def __init__(self, first: int = 0):
        self.first = first
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {
            "ids": np.arange(self.first, self.first + 5, dtype=np.int32),
            "rows": np.ones((2, 3), dtype=np.int64),
        }


def nothing_wrong(arrays: Mapping[str, np.ndarray]) -> None:
    """A look at loaded arrays that finds no fault."""


def load(directory, builder, description=DESCRIPTION):
    """The arrays, with any warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cached_arrays(directory, "t", description, ("ids", "rows"), builder, nothing_wrong)


def file(directory: Path, ending: str) -> Path:
    (path,) = (p for p in directory.iterdir() if p.name.endswith(ending))
    return path


def test_second_use_reads_the_files(tmp_path):
    builder = Builder()
    load(tmp_path / "made", builder)
    arrays = load(tmp_path / "made", builder)
    assert builder.calls == 1
    assert arrays["ids"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["rows"].shape == (2, 3)
    with pytest.raises(ValueError, match="read-only"):
        arrays["ids"][0] = 1
    assert not [p for p in (tmp_path / "made").iterdir() if ".tmp" in p.name]


def test_another_description_is_another_entry(tmp_path):
    assert load(tmp_path, Builder(0))["ids"][0] == 0
    assert load(tmp_path, Builder(7), {**DESCRIPTION, "dataset": "other"})["ids"][0] == 7
    assert load(tmp_path, Builder(9))["ids"][0] == 0


def test_key_ignores_the_order_of_items():
    assert cache_key({"a": 1, "b": 2}) == cache_key({"b": 2, "a": 1})
    assert cache_key({"a": 1}) != cache_key({"a": 2})


def test_no_directory_means_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(None, Builder())["ids"].size == 5
    assert list(tmp_path.iterdir()) == []


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def damage_array(directory: Path, content: bytes) -> None:
    file(directory, "-ids.npy").write_bytes(content)


def foreign_array(directory: Path) -> None:
    np.save(file(directory, "-ids.npy"), np.arange(5, dtype=np.int32) + 1)


def other_type(directory: Path) -> None:
    np.save(file(directory, "-ids.npy"), np.arange(5, dtype=np.int64))


def edit_manifest(directory: Path) -> None:
    path = file(directory, ".json")
    manifest = json.loads(path.read_text())
    manifest["key"] = "0" * 32
    path.write_text(json.dumps(manifest))


def forget_array(directory: Path) -> None:
    path = file(directory, ".json")
    manifest = json.loads(path.read_text())
    del manifest["arrays"]["rows"]
    path.write_text(json.dumps(manifest))


DAMAGES = {
    "flipped value": foreign_array,
    "other type": other_type,
    "empty": lambda d: damage_array(d, b""),
    "cut short": lambda d: damage_array(d, file(d, "-ids.npy").read_bytes()[:-3]),
    "half a header": lambda d: damage_array(d, file(d, "-ids.npy").read_bytes()[:20]),
    "a pickle": lambda d: damage_array(d, pickle.dumps(Bomb())),
    "objects": lambda d: np.save(file(d, "-ids.npy"), np.array([Bomb()]), allow_pickle=True),
    "an archive": lambda d: np.savez(open(file(d, "-ids.npy"), "wb"), a=np.ones(3)),  # noqa: SIM115
    "array missing": lambda d: file(d, "-ids.npy").unlink(),
    "manifest cut": lambda d: file(d, ".json").write_text('{"format": "mega'),
    "manifest empty": lambda d: file(d, ".json").write_text(""),
    "manifest of another kind": lambda d: file(d, ".json").write_text("[1, 2]"),
    "manifest foreign": edit_manifest,
    "manifest of fewer arrays": forget_array,
    "manifest without arrays": lambda d: file(d, ".json").write_text('{"arrays": 3}'),
}


@over_table("damage", DAMAGES)
def test_damaged_entries_are_rebuilt_with_a_warning(tmp_path, damage, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    load(cache, Builder())
    DAMAGES[damage](cache)
    again = Builder()
    with pytest.warns(UserWarning, match="is not usable .* it is rebuilt"):
        arrays = cached_arrays(cache, "t", DESCRIPTION, ("ids", "rows"), again, nothing_wrong)
    assert again.calls == 1
    assert arrays["ids"].tolist() == [0, 1, 2, 3, 4]
    assert not (tmp_path / "exploded").exists()
    sound = Builder()
    load(cache, sound)
    assert sound.calls == 0


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="stays in memory"):
        arrays = cached_arrays(tmp_path / "file", "t", DESCRIPTION, ("ids", "rows"), Builder(), nothing_wrong)
    assert arrays["ids"].size == 5


def test_many_at_once_all_get_the_same(tmp_path):
    def use(_: int) -> list[int]:
        return load(tmp_path, Builder())["ids"].tolist()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(use, range(40)))
    assert results == [[0, 1, 2, 3, 4]] * 40
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("names", [("ids", "rows"), ("rows", "ids")])
def test_the_names_may_come_in_any_order(tmp_path, names):
    build = Builder()
    for _ in range(2):
        cached_arrays(tmp_path, "t", DESCRIPTION, names, build, nothing_wrong)
    assert build.calls == 1
