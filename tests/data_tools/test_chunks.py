from __future__ import annotations

import gzip
import json
import sys
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megazero.data_tools.preprocessing import parsing
from megazero.data_tools.preprocessing.chunks import JsonlChunk, cut
from megazero.data_tools.preprocessing.parsing import LineRows, parse, parse_carefully
from megazero.errors import DataError
from tests.tables import over_table


def _lines(paths, size):
    return [chunk.rows(chunk.read()).lines for chunk in cut(paths, size)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), min_size=1),
    st.integers(1, 30),
    st.booleans(),
)
def test_chunks_hold_every_line_once_whatever_their_size(tmp_path_factory, lines, size, ends_with_newline):
    folder = tmp_path_factory.mktemp("cut")
    content = b"\n".join(lines) + (b"\n" if ends_with_newline else b"")
    # These would be taken for other kinds of files, and no JSON begins so.
    assume(content[:1] not in (b"\x1f", b"(", b"B", b"\xfd", b"P", b"A", b"\xff", b"7", b"\x04"))
    assume(content[1:4] != b"\x2a\x4d\x18")
    (folder / "plain").write_bytes(content)
    (folder / "packed").write_bytes(gzip.compress(content))
    expected = content.split(b"\n")
    expected = expected[:-1] if expected[-1] == b"" else expected
    if expected and expected[0].startswith(b"\xef\xbb\xbf"):
        expected[0] = expected[0][3:]
    for name in ("plain", "packed"):
        found = _lines([str(folder / name)], size)
        assert [line for part in found for line in part] == expected


def test_chunks_are_cut_where_the_arithmetic_says(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"aaa\nbb\nc\n\nlong line\n")
    assert [chunk.read() for chunk in cut([str(path)], 4)] == [b"aaa\n", b"bb\nc\n", b"\nlong line\n"]
    assert [(chunk.number, chunk.start, chunk.end) for chunk in cut([str(path)] * 2, 100)] == [
        (0, 0, 20),
        (1, 0, 20),
    ]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, 40).map(lambda n: b"x" * n), min_size=1),
    st.integers(1, 30),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_a_line_that_is_too_long_is_a_chunk_of_its_own(
    tmp_path_factory, lines, size, longest, ends_with_newline, packed
):
    """All lines come in order, those of more than `longest` bytes as places that nobody reads."""
    path = tmp_path_factory.mktemp("cut") / "f"
    content = b"\n".join(lines) + (b"\n" if ends_with_newline else b"")
    path.write_bytes(gzip.compress(content) if packed else content)
    expected = content.split(b"\n")
    expected = expected[:-1] if expected[-1] == b"" else expected
    found, place = [], 0
    for chunk in cut([str(path)], size, longest, goes_on=True):
        assert chunk.start == place
        place = chunk.end
        if chunk.beyond is None:
            found += chunk.rows(chunk.read()).lines
            continue
        assert chunk.beyond == longest
        found.append(content[chunk.start : chunk.end].removesuffix(b"\n"))
        assert len(found[-1]) > longest
        assert b"\n" not in found[-1]
    assert (found, place) == (expected, len(content))
    stopped = list(cut([str(path)], size, longest))
    assert [chunk.beyond is not None for chunk in stopped[:-1]] == [False] * (
        len(stopped) - 1 if stopped else 0
    )
    too_long = [line for line in expected if len(line) > longest]
    assert bool(too_long) == bool(stopped and stopped[-1].beyond is not None)
    read = [line for chunk in stopped if chunk.beyond is None for line in chunk.rows(chunk.read()).lines]
    assert read == (expected[: expected.index(too_long[0])] if too_long else expected)


def test_shrunken_file_is_noticed(tmp_path):
    (tmp_path / "f").write_bytes(b"abc\n")
    with pytest.raises(DataError, match="became shorter"):
        JsonlChunk(0, str(tmp_path / "f"), 0, 10).read()


def test_cut_gzip_file_is_named(tmp_path):
    path = tmp_path / "f.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-9])
    with pytest.raises(DataError, match=r"f\.gz.*whole gzip"):
        list(cut([str(path)]))


BAD = [
    (b"{", "malformed JSON"),
    (b'{"text": "a"} x', "malformed JSON"),
    (b'{"text": "a\x01"}', "malformed JSON"),
    (b'{"text": "\\x"}', "malformed JSON"),
    (b'\xef\xbb\xbf{"text": "a"}', "malformed JSON"),
    (b"[" * 100_000, "malformed JSON"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
    (b'{\x00"\x00t\x00', "malformed JSON"),
    (b'["text"]', "not an object"),
    (b'"text"', "not an object"),
    (b"7", "not an object"),
    (b'{"test": "a"}', "missing key"),
    (b"{}", "missing key"),
    (b'{"text": null}', "wrong type"),
    (b'{"text": 3}', "wrong type"),
    (b'{"text": ["a", 3]}', "wrong type"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b'{"text": "\\uDFFFx"}', "lone surrogate"),
    (b'{"text": ["ok", "\\ude00\\ud83d"]}', "lone surrogate"),
]
GOOD = [
    (b'{"text": "a", "text": "b"}', ["b"]),
    (b'{"text": "a", "score": NaN, "big": -Infinity}', ["a"]),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", ["a"]),
    (b'{"text": "\\ud83d\\ude00"}', ["\U0001f600"]),
    (b'{"text": "\\u0000\\n"}', ["\x00\n"]),
    (b' {"text": "a"} \r', ["a"]),
    (b'{"text": ""}', [""]),
    (b'{"text": ["a", "b"]}', ["a", "b"]),
    (b'{"text": []}', []),
    (b'{"text": "a", "x": ' + b"[" * 100 + b"]" * 100 + b"}", ["a"]),
]


@pytest.fixture(params=["orjson", "json", "orjson that accepts halves of surrogate pairs"])
def reader(request, monkeypatch):
    """With orjson and without it the same lines must be accepted and give the same texts."""
    if request.param == "orjson":
        pytest.importorskip("orjson")
    elif request.param != "json":
        lenient = SimpleNamespace(loads=lambda line: json.loads(str(line, "utf-8"), parse_int=float))
        monkeypatch.setitem(sys.modules, "orjson", lenient)
    else:
        monkeypatch.setitem(sys.modules, "orjson", None)


@pytest.mark.usefixtures("reader")
@over_table(("line", "reason"), BAD)
def test_bad_line_is_found_with_its_reason_between_good_ones(line, reason):
    parsed = parse(LineRows([b'{"text": "x"}', b"", line, b'{"text": "y"}']), ["text"])
    assert [(problem.line, problem.reason) for problem in parsed.problems] == [(2, reason)]
    assert parsed.columns[0].texts == ["x", "y"]
    assert parsed.lines == 4


@pytest.mark.usefixtures("reader")
@over_table(("line", "texts"), GOOD)
def test_unusual_good_line_gives_its_texts(line, texts):
    parsed = parse(LineRows([line, b'{"text": "y"}']), ["text"])
    assert (parsed.columns[0].texts, parsed.problems) == ([*texts, "y"], [])


@pytest.mark.usefixtures("reader")
@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text() | st.lists(st.text()) | st.none()))
)
def test_quick_and_careful_reading_agree(rows):
    lines = LineRows([json.dumps(row).encode() for row in rows])
    quick, careful = parse(lines, ["a", "b"]), parse_carefully(lines, ["a", "b"])
    assert quick.problems == careful.problems
    assert [column.texts for column in quick.columns] == [column.texts for column in careful.columns]


def test_line_bad_under_one_key_is_left_out_under_all():
    parsed = parse(LineRows([b'{"a": "1", "b": "2"}', b'{"a": "3"}']), ["a", "b"])
    assert [column.texts for column in parsed.columns] == [["1"], ["2"]]
    assert [problem.detail for problem in parsed.problems] == ["key `b` is missing (keys: a)"]


def test_good_lines_never_take_the_slow_road(monkeypatch):
    def refuse(*_):
        raise AssertionError("parsed line by line")

    monkeypatch.setattr(parsing, "parse_carefully", refuse)
    lines = [b'{"text": "\\ud83d\\ude00 a"}', '{"text": "é"}'.encode()]
    parsed = parse(LineRows(lines), ["text"])
    assert parsed.columns[0].texts == ["\U0001f600 a", "é"]
