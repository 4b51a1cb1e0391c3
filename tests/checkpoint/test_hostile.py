"""Checkpoints with right checksums whose content nobody sane wrote.

Each is refused by a CheckpointError that names the file, soon, in little memory, and with no file opened
outside the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.checkpoint.folder import LATEST, candidates
from megazero.checkpoint.manifest import INDEX, MANIFEST, STATE
from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader
from megazero.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.forged import edit, edit_manifest, make, reseal, sealed
from tests.tables import over_table

SHARD = "model-00001-of-00001.safetensors"
SECRET = "secret.json"


class Opened:
    """Records the paths that this process opens or lists while `watching`."""

    def __init__(self) -> None:
        self.watching = False
        self.paths: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if self.watching and event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], str):
            self.paths.append(args[0])


@pytest.fixture(scope="module")
def opened() -> Opened:
    """One recorder for all tests, because an audit hook cannot be removed."""
    return Opened()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run's folder with a checkpoint."""
    return make(tmp_path_factory.mktemp("made")).parent


def a_copy(made: Path, folder: Path) -> Path:
    """Copy the checkpoint into a folder, beside a file that it must not open."""
    (folder / SECRET).write_text("{}")
    shutil.copytree(made, folder / "run")
    return folder / "run" / "iter_0000007"


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return a_copy(made, tmp_path)


def read_everything(folder: Path) -> None:
    reader = CheckpointReader(folder)
    for key in reader.shapes:
        reader.tensor(key)


def refusal(
    opened: Opened, folder: Path, name: str, kind: type[CheckpointError] = DamagedCheckpointError
) -> str:
    """Read the whole checkpoint, which must be refused; return the message."""
    began = time.monotonic()
    tracemalloc.start()
    opened.paths.clear()
    opened.watching = True
    try:
        with pytest.raises(CheckpointError) as error:
            read_everything(folder)
    finally:
        opened.watching = False
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert type(error.value) is kind, error.value
    message = str(error.value)
    assert name in message
    message.encode()  # can be printed
    assert time.monotonic() - began < 5
    assert peak < 50e6
    assert [path for path in opened.paths if not path.startswith(str(folder))] == []
    return message


@pytest.fixture
def refused(opened, folder) -> Callable[..., str]:
    return partial(refusal, opened, folder)


def files_named(name: str) -> Callable[[dict], None]:
    """A change: the manifest lists another file, with the record of the one beside the run."""

    def change(manifest: dict) -> None:
        manifest["files"][name] = {"size": 2, "blocks": ["0123456789abcdef"]}

    return change


def entry(**fields: object) -> Callable[[dict], None]:
    """A change of a file's entry in the manifest."""
    return lambda manifest: manifest["files"][STATE].update(fields)


def fact(**fields: object) -> Callable[[dict], None]:
    return lambda manifest: manifest.update(fields)


def text(replace: str, by: str) -> Callable[[dict], str]:
    """A change of the JSON text, which Python would not write so."""

    def change(content: dict) -> str:
        written = json.dumps(content)
        assert replace in written
        return written.replace(replace, by, 1)

    return change


def without(*path: str | int) -> Callable[[dict], None]:
    """A change: the JSON lacks one entry."""

    def change(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        del content[path[-1]]

    return change


NAMES = [
    f"../{SECRET}",
    f"../../{SECRET}",
    f"/tmp/{SECRET}",
    "a/b",
    "a\\b",
    "..",
    ".",
    "",
    ".hidden",
    "a\n",
    "\n",
]
NAMES += [
    "a\0b",
    "-rf",
    "a b",
    "ａ.json",
    "\u2024\u2024/a",
    "a\u202ejson",
    "x" * 201,
    MANIFEST,
    "con:",
    "~",
    "$HOME",
]
MANIFESTS: dict[str, Callable[[dict], object]] = {
    **{f"a file called {name!r:.30}": files_named(name) for name in NAMES},
    "negative size": entry(size=-1),
    "size of a float": entry(size=2.0),
    "size of true": entry(size=True),
    "size of text": entry(size="2"),
    "huge size": entry(size=1 << 70),
    "large size without hashes": entry(size=1 << 50),
    "size in many digits": text('"size": ', '"size": ' + "9" * 5000),
    "size not a number": text('"size": ', '"size": NaN, "": '),
    "infinite size": text('"size": ', '"size": 1e999, "": '),
    "no size": without("files", STATE, "size"),
    "hash in capitals": entry(blocks=["0123456789ABCDEF"]),
    "short hash": entry(blocks=["0123"]),
    "hash with a line": entry(blocks=["0123456789abcdef\n"]),
    "hash of a number": entry(blocks=[123456789]),
    "other hash": entry(blocks=["0123456789abcdef"]),
    "no hashes": entry(blocks=[]),
    "more of it": entry(mode=0o777),
    "files in a list": lambda manifest: manifest.update(files=list(manifest["files"])),
    "a file of null": lambda manifest: manifest["files"].update({STATE: None}),
    "no index": without("files", INDEX),
    "no state": without("files", STATE),
    "no files": without("files"),
    "no iteration": without("iteration"),
    "a file twice": text(f'"{STATE}": ', f'"{STATE}": {{}}, "{STATE}": '),
    "two formats": text('"format": 2', '"format": 1, "format": 2'),
    "an escaped key twice": text('"format": 2', '"form\\u0061t": 2, "format": 2'),
    "negative iteration": fact(iteration=-7),
    "iteration of a float": fact(iteration=7.0),
    "iteration of true": fact(iteration=True),
    "another iteration": fact(iteration=8),
    "huge iteration": fact(iteration=1 << 80),
    "other blocks": fact(block_size=1),
    "more facts": fact(files_too={}),
    "deep": text('"iteration"', '"deep": ' + "[" * 200_000 + "]" * 200_000 + ', "iteration"'),
    "trailing": lambda manifest: json.dumps(manifest) + "{}",
    "half a pair": text('"iteration"', '"\\ud800": 1, "iteration"'),
}


@over_table("case", MANIFESTS)
def test_hostile_manifests(made, opened, tmp_path, case):
    folder = a_copy(made, tmp_path)
    edit_manifest(folder, MANIFESTS[case])
    refusal(opened, folder, str(folder))


@over_table("number", [0, 1, 4, 10**30, "2", None, True, {}])
def test_other_formats_are_refused_and_not_taken_for_damage(made, opened, tmp_path, number):
    folder = a_copy(made, tmp_path)
    edit_manifest(folder, fact(format=number))
    assert "must be of format 2 or 3, but is of" in refusal(opened, folder, MANIFEST, CheckpointError)


def piece(number: int = 0, **fields: object) -> Callable[[dict], None]:
    """A change of one tensor's piece in the index."""
    return lambda index: index["tensors"][number]["pieces"][0].update(fields)


def tensor(**fields: object) -> Callable[[dict], None]:
    return lambda index: index["tensors"][0].update(fields)


def of_shape(*shape: int) -> Callable[[dict], None]:
    """A change: the index's first tensor has another shape, in one piece."""

    def change(index: dict) -> None:
        tensor(shape=shape)(index)
        piece(shape=shape, offset=[0] * len(shape))(index)

    return change


def more_pieces(*pieces: tuple[list[int], list[int]]) -> Callable[[dict], None]:
    """A change: the index's first tensor, of shape [4, 3], has further pieces."""

    def change(index: dict) -> None:
        made = [{"file": SHARD, "offset": offset, "shape": shape} for offset, shape in pieces]
        index["tensors"][0]["pieces"] += made

    return change


INDEXES: dict[str, Callable[[dict], object]] = {
    "overlap": more_pieces(([0, 0], [1, 1])),
    "all twice": more_pieces(([0, 0], [4, 3])),
    "empty of other dims": more_pieces(([0], [0])),
    "empty of no dims": more_pieces(([], [])),
    "offset of other dims": more_pieces(([0, 0, 0], [1, 1])),
    "a gap": piece(shape=[4, 2]),
    "out of range": piece(offset=[1, 0]),
    "far out of range": piece(offset=[1 << 61, 0]),
    "beyond all numbers": piece(offset=[1 << 63, 0]),
    "negative offset": piece(offset=[-1, 0]),
    "offset of a float": piece(offset=[0.0, 0]),
    "offset of false": piece(offset=[False, 0]),
    "offset of text": piece(offset="00"),
    "no offset": without("tensors", 0, "pieces", 0, "offset"),
    "no shape": without("tensors", 0, "shape"),
    "no pieces": tensor(pieces=[]),
    "pieces of null": tensor(pieces=None),
    "pieces of text": tensor(pieces="ab"),
    "the file beside": piece(file=f"../{SECRET}"),
    "the file beside, in full": piece(file=f"/tmp/{SECRET}"),
    "itself": piece(file=INDEX),
    "the manifest": piece(file=MANIFEST),
    "a file that is not there": piece(file="model-00009-of-00009.safetensors"),
    "the other file": piece(file="optimizer-00001-of-00001.safetensors"),
    "a file of null": piece(file=None),
    "unknown dtype": tensor(dtype="F128"),
    "other dtype of this size": tensor(dtype="I32"),
    "other dtype": tensor(dtype="F64"),
    "dtype of a number": tensor(dtype=32),
    "turned": of_shape(3, 4),
    "flat": of_shape(12),
    "larger": of_shape(1 << 40, 3),
    "larger by one": of_shape(4, 4),
    "smaller": of_shape(4, 2),
    "beyond all memory": tensor(shape=[1 << 61, 1 << 61]),
    "beyond all memory and empty": tensor(shape=[1 << 61, 4, 0], pieces=[]),
    "shape of a float": tensor(shape=[4.0, 3]),
    "shape not a number": text('"shape": [', '"shape": [NaN, '),
    "another name": tensor(name="c"),
    "another kind": tensor(kind="exp_avg"),
    "no name": tensor(name=""),
    "name of null": tensor(name=None),
    "huge name": tensor(name="x" * 100_000),
    "half a pair": text('"name": "a"', '"name": "\\ud800"'),
    "twice": lambda index: {"tensors": index["tensors"] * 2},
    "a key twice": text('"name": "a"', '"name": "b", "name": "a"'),
    "more of it": tensor(strides=[1, 1]),
    "a list": lambda index: "[]",
    "null": lambda index: "null",
    "empty": lambda index: "",
    "deep": lambda index: '{"tensors": ' + "[" * 200_000 + "]" * 200_000 + "}",
    "no JSON": lambda index: "{'tensors': []}",
}


@over_table("case", INDEXES)
def test_hostile_indexes(made, opened, tmp_path, case):
    folder = a_copy(made, tmp_path)
    edit(folder / INDEX, INDEXES[case])
    message = refusal(opened, folder, str(folder))
    assert INDEX in message or "as the index says" in message


HEADERS = {
    "length": (1 << 62).to_bytes(8, "little"),
    "length of the file": (1 << 20).to_bytes(8, "little") + b"{}",
    "overlap": {"a": ("F32", [4, 3], [0, 48]), "b": ("BF16", [5], [40, 50])},
    "hole": {"a": ("F32", [4, 3], [0, 48]), "b": ("BF16", [5], [52, 62])},
    "out of range": {"a": ("F32", [4, 3], [1 << 40, (1 << 40) + 48])},
    "negative": {"a": ("F32", [4, 3], [-48, 0])},
    "huge shape": {"a": ("F32", [1 << 40, 1 << 40], [0, 48])},
}


@over_table("case", HEADERS)
def test_hostile_tensor_files(made, opened, tmp_path, case):
    folder = a_copy(made, tmp_path)
    header = HEADERS[case]
    if isinstance(header, dict):
        keys = ("dtype", "shape", "data_offsets")
        written = json.dumps(
            {name: dict(zip(keys, each, strict=True)) for name, each in header.items()}
        ).encode()
        header = len(written).to_bytes(8, "little") + written
    (folder / SHARD).write_bytes(header + bytes(58))
    reseal(folder)
    refusal(opened, folder, SHARD)


@over_table("content", ["", "null", "[]", "3", '{"a": 1, "a": 2}', "{", "\ud800", '{"a": ' * 100_000])
def test_hostile_states(made, opened, tmp_path, content):
    folder = a_copy(made, tmp_path)
    edit(folder / STATE, lambda facts: content or " ")
    refusal(opened, folder, STATE)


@pytest.mark.parametrize("name", [MANIFEST, INDEX, STATE])
def test_a_description_of_many_bytes_is_not_read(folder, refused, name):
    """A sparse file of any size costs its maker nothing."""
    size = 1 << 36
    os.truncate(folder / name, size)
    if name != MANIFEST:
        edit_manifest(folder, lambda m: m["files"][name].update(size=size, blocks=["0" * 16] * (size >> 22)))
    assert f"{size} bytes are more than" in refused(name)


def a_link(path: Path) -> None:
    path.rename(path.parents[2] / path.name)
    path.symlink_to(path.parents[2] / path.name)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def nothing_to_read(path: Path) -> None:
    path.unlink()


@over_table("become", [a_link, a_pipe, a_folder, nothing_to_read])
@over_table("name", [MANIFEST, INDEX, STATE, SHARD])
def test_what_is_no_file(made, opened, tmp_path, name, become):
    folder = a_copy(made, tmp_path)
    become(folder / name)
    refusal(opened, folder, name)


def test_a_file_that_may_not_be_read(folder, refused, monkeypatch):
    real = os.open

    def refusing(path, *args, **kwargs):
        if str(path).endswith(SHARD):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    assert "Permission denied" in refused(SHARD)


@pytest.mark.parametrize("become", [a_link, a_pipe, a_folder])
def test_the_name_of_the_newest_is_no_file(folder, become):
    path = folder.parent / LATEST
    if become is a_link:
        path.unlink()
        path.symlink_to(folder.parents[1] / SECRET)
    else:
        become(path)
    found = candidates(folder.parent)
    assert found.folders == (folder,)
    (remark,) = found.remarks
    assert str(path) in remark


def test_the_name_of_the_newest_has_many_bytes(folder):
    os.truncate(folder.parent / LATEST, 1 << 40)
    (remark,) = candidates(folder.parent).remarks
    assert "bytes are more than" in remark


def test_a_link_to_another_checkpoint_is_not_it(folder):
    other = folder.with_name("iter_0000009")
    other.symlink_to(folder.name)
    with pytest.raises(DamagedCheckpointError, match=f"`{other}` must be iter_0000007 by its manifest"):
        CheckpointReader(other)


def test_a_checkpoint_may_lie_elsewhere_under_its_name(folder, tmp_path):
    (tmp_path / "store").mkdir()
    folder.rename(tmp_path / "store" / folder.name)
    folder.symlink_to(tmp_path / "store" / folder.name)
    assert torch.equal(CheckpointReader(folder).tensor(Key("a")), torch.arange(12.0).view(4, 3))


def test_a_seal_of_what_was_written_is_the_same(folder):
    """Else the tests above would pass because of wrong checksums alone."""
    before = (folder / MANIFEST).read_bytes()
    reseal(folder)
    assert (folder / MANIFEST).read_bytes() == before
    assert sealed("{" + before.decode().split(",\n", 1)[1]) == before
    assert CheckpointReader(folder).facts["vocab_size"] == 5
