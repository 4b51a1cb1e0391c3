"""Only regular files are opened: nothing else is waited for, and nothing without an end is read."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from megazero.regular_file import open_regular, read_regular, read_regular_text, why_unreadable


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file") == b"content"
    assert read_regular(str(tmp_path / "link")) == b"content"
    with open_regular(tmp_path / "file") as file:
        assert file.seek(3) == 3
        assert file.readline() == b"tent"


def refusal(path: Path) -> OSError:
    with pytest.raises(OSError) as caught:
        open_regular(path)
    assert caught.value.filename == str(path)
    return caught.value


def test_a_fifo_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    error = refusal(tmp_path / "pipe")
    assert (error.errno, error.strerror) == (errno.EINVAL, "it is a FIFO, not a regular file")


def test_a_link_to_a_device_is_refused(tmp_path: Path):
    (tmp_path / "endless").symlink_to("/dev/zero")
    error = refusal(tmp_path / "endless")
    assert (error.errno, error.strerror) == (errno.EINVAL, "it is a device, not a regular file")


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        error = refusal(Path("socket"))
    assert (error.errno, error.strerror) == (errno.EINVAL, "it is a socket, not a regular file")


def test_what_is_missing_or_a_folder_stays_the_systems_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_text_is_read_as_python_reads_it(tmp_path: Path):
    (tmp_path / "file").write_bytes("a\r\nb\rĉ\n".encode())
    assert (
        read_regular_text(tmp_path / "file") == (tmp_path / "file").read_text(encoding="utf-8") == "a\nb\nĉ\n"
    )
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_regular_text(tmp_path / "file")


def test_what_to_do_is_said_where_the_file_is_none(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    told = "it is a FIFO, not a regular file; write its content to a file and name that"
    assert why_unreadable(refusal(tmp_path / "pipe")) == told
    assert why_unreadable(refusal(tmp_path / "missing")) == "No such file or directory"
