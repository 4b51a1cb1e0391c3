"""Changes of the file system happen whole, in the open and one by one; what the system refuses is raised."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from megazero.checkpoint import disk as disk_module
from megazero.checkpoint.disk import Disk, File, appear
from tests.tables import over_table


class Stop(BaseException):
    """Simulates the end of the process."""


class ScriptedDisk(Disk):
    """Logs each change, and raises `error` instead of the change called `at`."""

    def __init__(self, at: str = "", error: BaseException | None = None):
        self.at, self.error = at, error
        self.changes: list[str] = []

    def note(self, change: str, path: Path) -> None:
        self.changes.append(f"{change} {path.name}")
        if change == self.at:
            raise self.error

    def make_folder(self, path):
        self.note("make_folder", path)
        super().make_folder(path)

    def create(self, path):
        self.note("create", path)
        return ScriptedFile(self, path, super().create(path))

    def rename(self, old, new):
        self.note("rename", new)
        super().rename(old, new)

    def sync_folder(self, path):
        self.note("sync_folder", path)
        super().sync_folder(path)

    def remove_file(self, path):
        self.note("remove_file", path)
        super().remove_file(path)

    def remove_folder(self, path):
        self.note("remove_folder", path)
        super().remove_folder(path)


class ScriptedFile:
    """A file of a `ScriptedDisk`."""

    def __init__(self, disk: ScriptedDisk, path: Path, file: File):
        self.disk, self.path, self.file = disk, path, file

    def write(self, data):
        self.disk.note("write", self.path)
        self.file.write(data)

    def sync(self):
        self.disk.note("sync", self.path)
        self.file.sync()

    def close(self):
        self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_file_gets_all_that_is_written(tmp_path, monkeypatch):
    """The system may take few bytes at a time."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    with Disk().create(tmp_path / "f") as file:
        file.write(b"0123456789")
        file.write(b"")
        file.write(memoryview(b"ab"))
        file.sync()
    file.close()
    assert (tmp_path / "f").read_bytes() == b"0123456789ab"


def test_a_full_disk_is_raised_unchanged(tmp_path, monkeypatch):
    def refuse(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Disk().create(tmp_path / "f") as file:
        monkeypatch.setattr(os, "write", refuse)
        with pytest.raises(OSError, match="No space left") as caught:
            file.write(b"x")
    assert caught.value.errno == errno.ENOSPC


def test_sync_brings_the_file_to_the_medium(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with Disk().create(tmp_path / "f") as file:
        file.write(b"x")
        file.sync()
    assert synced == [(tmp_path / "f").stat().st_ino]


def test_create_respects_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        Disk().create(tmp_path / "f").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


@over_table("there", ["file", "folder", "link to a file", "link to nothing"])
def test_create_refuses_a_name_that_is_taken(tmp_path, there):
    path, other = tmp_path / "f", tmp_path / "other"
    if there == "file":
        path.write_bytes(b"old")
    elif there == "folder":
        path.mkdir()
    else:
        path.symlink_to(other)
        if there == "link to a file":
            other.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        Disk().create(path)
    assert path.is_symlink() == there.startswith("link")
    assert not (there == "link to nothing" and other.exists())
    assert all(file.read_bytes() == b"old" for file in (path, other) if file.is_file())


def test_what_was_written_is_sent_on_its_way_once_and_in_order(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(disk_module, "_SENT_BYTES", 10)
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: sent.append(call[1:3]))
    with Disk().create(tmp_path / "f") as file:
        for size in (4, 4, 4, 25, 9, 1):
            file.write(bytes(size))
    assert sent == [(0, 12), (12, 25), (37, 10)]


def test_a_system_without_such_advice_writes_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "_SENT_BYTES", 10)
    monkeypatch.delattr(os, "posix_fadvise")
    with Disk().create(tmp_path / "f") as file:
        file.write(bytes(25))
    assert (tmp_path / "f").stat().st_size == 25


def test_make_folder_makes_one(tmp_path):
    Disk().make_folder(tmp_path / "a")
    with pytest.raises(FileExistsError):
        Disk().make_folder(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        Disk().make_folder(tmp_path / "b" / "c")


def test_make_parents_puts_each_name_on_the_medium(tmp_path):
    disk = ScriptedDisk()
    disk.make_parents(tmp_path / "a" / "b")
    disk.make_parents(tmp_path / "a" / "b")
    assert disk.changes == [
        "make_folder a",
        f"sync_folder {tmp_path.name}",
        "make_folder b",
        "sync_folder a",
    ]


def test_make_parents_meets_another_that_makes_the_same(tmp_path):
    class Late(Disk):
        def make_folder(self, path):
            path.mkdir()
            super().make_folder(path)

    Late().make_parents(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_make_parents_refuses_a_file_in_the_way(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FileExistsError):
        Disk().make_parents(tmp_path / "a")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        Disk().make_parents(tmp_path / "a" / "b")


def test_a_renamed_file_replaces(tmp_path):
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"old")
    Disk().rename(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path) == ["b"]
    assert (tmp_path / "b").read_bytes() == b"new"


@over_table("there", ["an empty folder", "a full folder", "a file", "a link to nothing"])
def test_a_renamed_folder_replaces_nothing(tmp_path, there):
    """The system itself would replace an empty folder."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    if there == "a file":
        new.write_bytes(b"")
    elif there == "a link to nothing":
        new.symlink_to("nothing")
    else:
        new.mkdir()
        if there == "a full folder":
            (new / "f").write_bytes(b"")
    with pytest.raises(FileExistsError, match="new"):
        Disk().rename(old, new)
    assert names(tmp_path) == ["new", "old"]
    Disk().remove(new)
    Disk().rename(old, new)
    assert names(tmp_path) == ["new"]


def test_remove_takes_what_is_in_a_folder_one_by_one(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_bytes(b"x")
    (tmp_path / "a" / "c").write_bytes(b"x")
    disk = ScriptedDisk()
    disk.remove(tmp_path / "a")
    assert disk.changes == ["remove_file f", "remove_folder b", "remove_file c", "remove_folder a"]
    assert names(tmp_path) == []


def test_remove_follows_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"kept")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "to_folder").symlink_to(outside)
    (inside / "to_file").symlink_to(outside / "f")
    (inside / "to_nothing").symlink_to(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(outside)
    Disk().remove(inside)
    Disk().remove(tmp_path / "link")
    assert names(tmp_path) == ["outside"]
    assert (outside / "f").read_bytes() == b"kept"


def test_remove_of_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Disk().remove(tmp_path / "nothing")


def test_sync_folder_accepts_a_file_system_that_cannot(tmp_path, monkeypatch):
    def refuse(number):
        def fsync(descriptor):
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    Disk().sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Disk().sync_folder(tmp_path)


def test_text_is_written_aside_and_renamed_when_it_is_on_the_medium(tmp_path):
    (tmp_path / "t").write_text("old")
    disk = ScriptedDisk()
    disk.write_text(tmp_path / "t", "né\n")
    assert (tmp_path / "t").read_bytes() == b"n\xc3\xa9\n"
    assert names(tmp_path) == ["t"]
    aside = disk.changes[0].removeprefix("create ")
    assert aside.startswith(".t.")
    assert disk.changes == [
        f"create {aside}",
        f"write {aside}",
        f"sync {aside}",
        "rename t",
        f"sync_folder {tmp_path.name}",
    ]


@over_table("step", ["create", "write", "sync", "rename", "sync_folder"])
def test_text_that_cannot_be_written_leaves_nothing_else(tmp_path, step):
    (tmp_path / "t").write_text("old")
    failure = OSError(errno.EIO, "broken")
    with pytest.raises(OSError, match="broken") as caught:
        ScriptedDisk(step, failure).write_text(tmp_path / "t", "new")
    assert caught.value is failure
    assert names(tmp_path) == ["t"]
    # After the rename, only whether the new name outlives a power cut is unknown.
    assert (tmp_path / "t").read_text() == ("new" if step == "sync_folder" else "old")


def test_the_first_failure_is_the_one_that_is_raised(tmp_path):
    class Broken(ScriptedDisk):
        def remove_file(self, path):
            raise OSError(errno.EROFS, "a later one")

    with pytest.raises(OSError, match="the first"):
        Broken("rename", OSError(errno.EIO, "the first")).write_text(tmp_path / "t", "new")


@over_table("step", ["write", "sync", "rename"])
def test_a_process_killed_in_write_text_leaves_the_old_text_and_a_hidden_file(tmp_path, step):
    (tmp_path / "t").write_text("old")
    with pytest.raises(Stop):
        ScriptedDisk(step, Stop()).write_text(tmp_path / "t", "new")
    assert (tmp_path / "t").read_text() == "old"
    assert [name.startswith(".t.") for name in names(tmp_path)] == [True, False]


def fill(disk: Disk, folder: Path) -> str:
    with disk.create(folder / "f") as file:
        file.write(b"new")
        file.sync()
    return "filled"


def test_a_folder_appears_when_it_is_on_the_medium(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.partial").mkdir()
    disk = ScriptedDisk()
    assert appear(disk, tmp_path / "out", lambda aside: fill(disk, aside)) == "filled"
    assert (tmp_path / "out" / "f").read_text() == "new"
    assert disk.changes == [
        "remove_folder .out.partial",
        "make_folder .out.partial",
        "create f",
        "write f",
        "sync f",
        "sync_folder .out.partial",
        "remove_folder out",
        "rename out",
        f"sync_folder {tmp_path.name}",
    ]


@over_table("error", [OSError(errno.EIO, "broken"), Stop()])
@over_table("step", ["create", "write", "sync", "rename"])
def test_a_folder_that_cannot_be_filled_leaves_nothing(tmp_path, step, error):
    disk = ScriptedDisk(step, error)
    with pytest.raises(type(error)) as caught:
        appear(disk, tmp_path / "out", lambda aside: fill(disk, aside))
    assert caught.value is error
    assert names(tmp_path) == []


def test_a_link_to_an_empty_folder_is_replaced(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "out").symlink_to("target")
    disk = Disk()
    appear(disk, tmp_path / "out", lambda aside: fill(disk, aside))
    assert names(tmp_path) == ["out", "target"]
    assert not (tmp_path / "out").is_symlink()
    assert names(tmp_path / "out") == ["f"]
    assert names(tmp_path / "target") == []


def test_a_folder_that_another_filled_meanwhile_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").touch()
    disk = Disk()
    with pytest.raises(OSError, match="not empty"):
        appear(disk, tmp_path / "out", lambda aside: fill(disk, aside))
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["theirs"]
