"""Files that appear whole or not at all."""

from __future__ import annotations

import os

import pytest

from megazero.data.files import whole_file


def test_a_file_appears_only_when_whole(tmp_path):
    target = tmp_path / "new" / "f"
    with whole_file(target) as file:
        file.write(b"one")
        assert not target.exists()
    assert target.read_bytes() == b"one"
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()
    with pytest.raises(TypeError), whole_file(target) as file:
        file.write("no bytes")
    assert target.read_bytes() == b"one"
    assert [path.name for path in target.parent.iterdir()] == ["f"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
