from __future__ import annotations

import gzip

import pytest

from megazero.data_tools.preprocessing.chunks import FileSegment, cut, divide, lines_before


def test_parts_are_whole_lines_in_order_for_any_number_of_them(tmp_path):
    lines = [b"x" * (i * 7 % 23) + b"\n" for i in range(50)]
    first, second, packed = (tmp_path / name for name in ("a", "b", "c"))
    first.write_bytes(b"".join(lines[:30]) + b"no newline")
    second.write_bytes(b"")
    packed.write_bytes(gzip.compress(b"".join(lines[30:])))
    paths = [str(path) for path in (first, second, packed, first)]
    whole = [(chunk.path, chunk.read()) for chunk in cut(paths)]
    content = b"".join(data for _, data in whole)
    for parts in range(1, 12):
        shares = divide(paths, parts)
        assert len(shares) == parts
        got = [chunk.read() for share in shares for chunk in cut(share, 40)]
        assert b"".join(got) == content
        assert all(data.endswith((b"\n", b"no newline")) for data in got)


def test_parts_are_of_about_equal_size(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"123456789\n" * 100)
    assert divide([str(path)], 3) == [
        [FileSegment(str(path), 0, 340)],
        [FileSegment(str(path), 340, 670)],
        [FileSegment(str(path), 670, 1000)],
    ]
    assert divide([str(path)], 1) == [[FileSegment(str(path), 0, 1000)]]


@pytest.mark.parametrize(("start", "lines"), [(0, 0), (3, 1), (6, 3)])
def test_lines_before_a_stretch_are_counted(tmp_path, start, lines):
    path = tmp_path / "a"
    path.write_bytes(b"12\n4\n\n78\n")
    assert lines_before(FileSegment(str(path), start)) == lines
