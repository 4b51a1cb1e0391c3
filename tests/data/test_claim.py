"""One writer of an output at a time; what killed ones left goes, and nothing else."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megazero.data.files import OutputClaim, temporary_path
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_efficiency.disk import whole_folder
from megazero.errors import DataError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs flock")

HOLD = """
import sys, time
import numpy as np
from megazero.data.indexed.writer import IndexedDatasetWriter
writer = IndexedDatasetWriter(sys.argv[1], np.uint16)
writer.add_raw(np.arange(5), np.array([5]))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """A process that writes the dataset `d`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "d")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_raw(np.arange(3), np.array([3]))


def test_a_second_writer_is_refused_by_name(tmp_path, other):
    before = names(tmp_path)
    with pytest.raises(DataError, match=rf"d` must be written by one process .* process {other.pid} on "):
        write(tmp_path / "d")
    assert names(tmp_path) == before
    write(tmp_path / "e")


def test_remains_of_a_killed_writer_go_with_the_next(tmp_path, other):
    others = (".e.tmp-1-0123abcd.bin", ".d.tmp", ".dd.tmp-1-0123abcd", ".d.tmp-x.tmp-1-0123abcd.bin", "d.txt")
    for name in others:
        (tmp_path / name).write_bytes(b"not d's")
    kept = [name for name in names(tmp_path) if not name.startswith((".d.tmp-" + str(other.pid), ".d.lock"))]
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    parts = tmp_path / ".d.tmp-77-0123abcd.parts"
    parts.mkdir()
    (parts / "0-text.bin").write_bytes(b"half")
    assert len(names(tmp_path)) == len(kept) + 3  # its tokens, its lock and the parts
    write(tmp_path / "d")
    assert names(tmp_path) == sorted([*kept, "d.bin", "d.idx", "d.sum"])


def test_a_link_among_the_remains_is_not_followed(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"kept")
    (tmp_path / ".d.tmp-1-0123abcd").symlink_to(tmp_path / "precious")
    write(tmp_path / "d")
    assert names(tmp_path) == ["d.bin", "d.idx", "d.sum", "precious"]
    assert names(tmp_path / "precious") == ["file"]


def test_within_a_process_too(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", np.uint16), pytest.raises(DataError, match=f"{os.getpid()} on"):
        IndexedDatasetWriter(tmp_path / "d", np.uint16)
    write(tmp_path / "d")


def test_a_claim_ends_with_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), IndexedDatasetWriter(tmp_path / "d", np.uint16):
        raise ZeroDivisionError
    assert names(tmp_path) == []
    write(tmp_path / "d")


def test_where_there_are_no_locks_nothing_is_refused_or_removed(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = tmp_path / ".d.tmp-1-0123abcd.bin"
    left.write_bytes(b"whose?")
    first, second = OutputClaim(tmp_path / "d"), OutputClaim(tmp_path / "d")
    first.release()
    second.release()
    assert names(tmp_path) == [left.name]


def test_a_lock_that_its_owner_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """The file that was opened is locked, but has no name any more: others would lock another one."""
    real, calls = fcntl.flock, []

    def flock(file, how):
        real(file, how)
        calls.append(how)
        if len(calls) == 1:
            (tmp_path / ".d.lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    mine = OutputClaim(tmp_path / "d")
    assert len(calls) == 2
    monkeypatch.setattr(fcntl, "flock", real)
    with pytest.raises(DataError, match="by one process at a time"):
        OutputClaim(tmp_path / "d")
    mine.release()


def test_folders_of_an_analysis(tmp_path):
    """A scratch folder was removed under the hands of whoever was filling it."""
    left = temporary_path(tmp_path / "m")
    left.mkdir()
    with whole_folder(tmp_path / "m") as scratch:
        assert not left.exists()
        with pytest.raises(DataError, match="by one process at a time"), whole_folder(tmp_path / "m"):
            pass
        (scratch / "a.bin").write_bytes(b"whole")
    assert names(tmp_path) == ["m"]
    assert names(tmp_path / "m") == ["a.bin"]
