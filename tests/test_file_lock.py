"""Locks on open files: refused, waited for, freed with their process, or not to be had."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megazero.file_lock import try_lock

HOLD = """
import sys
from megazero.file_lock import try_lock
file = open(sys.argv[1], "w")
print(try_lock(file.fileno()), flush=True)
sys.stdin.read()
"""


def test_a_lock_is_refused_until_its_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with open(tmp_path / "lock") as file:
            with pytest.raises(BlockingIOError):
                try_lock(file.fileno())
            holder.kill()
            assert try_lock(file.fileno(), wait=True)


def test_who_waits_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    holder = open(tmp_path / "lock", "w")  # noqa: SIM115 (closed by the timer)
    assert try_lock(holder.fileno())
    timer = threading.Timer(0.1, holder.close)
    timer.start()
    with open(tmp_path / "lock") as file:
        assert try_lock(file.fileno(), wait=True)
        assert holder.closed
    timer.join()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_where_there_are_no_locks_nothing_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with open(tmp_path / "lock", "w") as file:
        assert not try_lock(file.fileno())
        assert not try_lock(file.fileno(), wait=True)


def test_another_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.EIO, "a broken disk")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with open(tmp_path / "lock", "w") as file, pytest.raises(OSError, match="a broken disk"):
        try_lock(file.fileno())
