"""Kinds of inputs: recognized by content, whole or refused, and bad rows named."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.data_tools.cli import expand_inputs
from megazero.data_tools.preprocess_data import main
from megazero.data_tools.preprocessing.chunks import cut
from megazero.data_tools.preprocessing.inputs import kind_of
from megazero.errors import DataError
from tests.data_tools.conftest import BYTES, NULL, visible, write_jsonl
from tests.data_tools.preprocessing import read_documents
from tests.tables import over_table

TEXT = b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(3000))


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(data)


PACKS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstd,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


def content(path: Path) -> bytes:
    return b"".join(chunk.read() for chunk in cut([str(path)]))


@over_table(("kind", "python"), [*((kind, False) for kind in PACKS), ("gzip", True)])
def test_an_archive_is_read_to_its_end_or_refused(tmp_path, monkeypatch, kind, python):
    """Readers that stop after a first member, or take a cut frame for the end, lose documents in silence."""
    if python:
        monkeypatch.setitem(sys.modules, "isal.igzip", None)
    path, pack = tmp_path / "no suffix", PACKS[kind]
    members = [pack(TEXT), pack(b""), pack(TEXT[:99])]
    whole = b"".join(members)
    path.write_bytes(whole)
    assert kind_of(str(path)) == kind
    assert content(path) == TEXT + TEXT[:99]
    ends = [len(members[0]), len(members[0]) + len(members[1])]
    for length in {3, 9, 30, len(whole) // 2, len(whole) - 1, len(whole) - 5, *(end + 3 for end in ends)}:
        path.write_bytes(whole[:length])
        if length > 5:
            with pytest.raises(
                DataError, match=rf"must be a whole {kind} file, but is damaged .*fetch it again"
            ):
                content(path)
    path.write_bytes(whole + b"{}\n")
    with pytest.raises(DataError, match=f"must be a whole {kind} file, but is damaged"):
        content(path)


def test_frames_that_are_skipped_windows_that_are_long_and_blocks_of_one_byte(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=30, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    long = stream.compress(TEXT) + stream.flush()
    zeros = b" " * 3_000_000 + b"\n"
    path = tmp_path / "f"
    path.write_bytes(b"\x53\x2a\x4d\x18\x03\0\0\0abc" + long + zstandard.ZstdCompressor().compress(zeros))
    assert kind_of(str(path)) == "zstd"
    assert content(path) == TEXT + zeros


def test_padding_between_streams_of_xz_is_no_damage(tmp_path):
    (tmp_path / "f").write_bytes(lzma.compress(TEXT) + b"\0" * 8 + lzma.compress(TEXT) + b"\0" * 4)
    assert content(tmp_path / "f") == TEXT * 2


@over_table(
    ("module", "kind", "package"),
    [("zstandard", "zstd", "zstandard"), ("pyarrow", "parquet", "pyarrow")],
)
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, capsys, module, kind, package):
    path = tmp_path / "f"
    path.write_bytes(zstd(TEXT) if kind == "zstd" else b"PAR1")
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["--input", str(path), "--output-prefix", str(tmp_path / "p"), *BYTES]) == 1
    assert f"run `pip install {package}`" in capsys.readouterr().err
    assert visible(tmp_path) == ["f"]


def table(path: Path, **columns: object) -> str:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path)
    return str(path)


@over_table(
    ("key", "words"),
    [
        ("nothing", "`nothing` is none (columns: text, structs, number, inside)"),
        ("inside.nothing", "`inside.nothing` is none (columns: text, structs, number, inside)"),
        ("text.a", "`text.a` is none (columns"),
        (
            "structs",
            "must be a column of strings or of lists of strings, but is list<element: struct<a: int64>>",
        ),
        ("number", "must be a column of strings or of lists of strings, but is int64"),
        ("inside", "must be a column of strings or of lists of strings, but is struct<a: string>"),
    ],
)
def test_a_column_that_is_no_text_is_refused(tmp_path, capsys, key, words):
    columns = {"text": ["1"], "structs": [[{"a": 1}]], "number": [1], "inside": [{"a": "2"}]}
    path = table(tmp_path / "f", **columns)
    flags = ["--output-prefix", str(tmp_path / "out" / "p"), "--json-keys", key, *NULL]
    (tmp_path / "out").mkdir()
    assert main(["--input", path, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
    assert visible(tmp_path / "out") == []


def test_bad_rows_are_named_counted_and_set_aside(tmp_path, out, capsys):
    """Parquet keeps whatever bytes it was given."""
    pa = pytest.importorskip("pyarrow")
    text = pa.array([b"1", b"\xff\xfe", b"2", None, b"x"], pa.binary()).view(pa.string())
    rows = table(tmp_path / "f.parquet", text=text)
    lines = write_jsonl(tmp_path / "g.jsonl", [{"text": "3"}, b'{"text": "\\ud800"}', {"text": "4"}])
    flags = ["--input", rows, lines, "--output-prefix", str(out / "p"), *NULL]
    assert main(flags) == 1
    assert "f.parquet, row 2: not UTF-8: byte 0xff at 1 of key `text`" in capsys.readouterr().err
    assert visible(out) == []
    assert main([*flags, "--on-bad-line", "skip", "--bad-lines", str(out / "bad"), "--workers", "2"]) == 0
    error = capsys.readouterr().err
    assert "skipped 4 lines (lone surrogate 1, not UTF-8 1, not tokenizable 1, wrong type 1)" in error
    assert read_documents(str(out / "p_text_document")) == [[[1]], [[2]], [[3]], [[4]]]
    listed = [json.loads(line) for line in (out / "bad").read_text().splitlines()]
    assert [(Path(row["file"]).name, row["line"], row["reason"]) for row in listed] == [
        ("f.parquet", 2, "not UTF-8"),
        ("f.parquet", 4, "wrong type"),
        ("f.parquet", 5, "not tokenizable"),
        ("g.jsonl", 2, "lone surrogate"),
    ]
    both = [*flags, "--on-bad-line", "skip", "--bad-lines", str(out / "parts"), "--workers", "2"]
    assert main([*both, "--partitions", "2"]) == 0
    assert (out / "parts").read_bytes() == (out / "bad").read_bytes()
    assert main([*flags, "--bad-lines", str(out / "no")]) == 1
    assert "must come with `--on-bad-line skip`" in capsys.readouterr().err


def test_a_row_that_is_too_long_is_a_bad_row(tmp_path):
    texts = ["a" * 30, "b" * 31, "c", "é" * 16]
    path = table(tmp_path / "f", text=texts, other=["x"] * 4)
    chunks = list(cut([path], 64, 30, goes_on=True))
    kept = [
        row for chunk in chunks if not chunk.beyond for row in chunk.rows(chunk.read()).columns(["text"])[0]
    ]
    assert kept == [texts[0], texts[2]]
    assert [chunk.start for chunk in chunks if chunk.beyond] == [1, 3]
    assert [str(chunk.too_long().detail) for chunk in chunks if chunk.beyond] == [
        "the row has more than 30 bytes"
    ] * 2


@over_table("damage", ["cut", "no end", "no footer", "other index", "other split"])
def test_tables_that_are_not_whole_are_refused(tmp_path, damage):
    pa = pytest.importorskip("pyarrow")
    schema = pa.schema([("text", pa.string())])
    folder = tmp_path / "saved"
    folder.mkdir()
    with pa.OSFile(str(folder / "d.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for _ in range(3):
            stream.write_batch(pa.record_batch({"text": ["1", "2"]}))
    data = (folder / "d.arrow").read_bytes()
    state = {"_data_files": [{"filename": "d.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    assert expand_inputs([str(folder)]) == [str(folder / "d.arrow")]
    assert len(list(cut([str(folder / "d.arrow")]))) == 3
    if damage in ("cut", "no end"):
        (folder / "d.arrow").write_bytes(data[: -8 if damage == "no end" else len(data) // 2])
        words = "must be a whole Arrow file, but is damaged"
    elif damage == "no footer":
        path = table(folder / "d.arrow", text=["1"])
        Path(path).write_bytes(Path(path).read_bytes()[:-3])
        words = "must be a whole Parquet file, but is damaged"
    elif damage == "other index":
        (folder / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "i"}]}))
        words = "lists rows by an index of its own"
    else:
        folder, words = tmp_path, "must name one split, but .* has .*saved"
    with pytest.raises(DataError, match=words):
        list(cut(expand_inputs([str(folder)])))


def test_archives_of_other_kinds_and_two_standard_inputs_are_refused(tmp_path, capsys):
    (tmp_path / "f").write_bytes(b"PK\x03\x04.....")
    assert main(["--input", str(tmp_path / "f"), "--output-prefix", str(tmp_path / "p"), *NULL]) == 1
    assert "but is a zip archive; unpack it first" in capsys.readouterr().err
    with pytest.raises(DataError, match="must name standard input once"):
        expand_inputs(["-", "-"])


def test_a_key_is_taken_as_it_is_before_its_dots_are_a_path(tmp_path, out):
    rows = [{"a": {"b": "1"}}, {"a.b": "2", "a": {"b": "3"}}]
    lines = write_jsonl(tmp_path / "f.jsonl", rows)
    keys = ["--json-keys", "a.b", *NULL]
    assert main(["--input", lines, "--output-prefix", str(out / "p"), *keys]) == 0
    assert read_documents(str(out / "p_a.b_document")) == [[[1]], [[2]]]
