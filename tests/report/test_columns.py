"""Columns of numbers: both readers agree, damage is named, and what grows is read where it grew."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megazero.errors import DataError
from megazero.report import columns as module
from megazero.report.columns import Lines, columns_reference, compiled
from tests.report.samples import record

STRANGE = (
    b'{"iteration": 1, "loss": 0.1, "deep": {"a": -1e-320, "b": {"c": true}}, "list": [{"x": "]}"}]}\n'
    b'{"loss": "NaN", "iteration": 2, "deep": {"a": 1.7976931348623e308, "few": [1, 2.5, null, 4, 5]}}\n'
    b'{ "iteration" : 3 , "loss" : "-Infinity" , "text" : "a \\" , } b", "big": 12345678901234567890123 }\n'
    b"not json\n"
    b'{"iteration": 4, "loss": 7, "loss": 8, "deep": {}, "empty": []}\n'
    b'{"iteration": 5, "loss": 9\n'
    b"[1, 2]\n"
    b'{"iteration": 6, "huge": 1e999, "tiny": 1e-999, "e": 1E+2}\n'
    b"{}\n"
    b"\0\0\0\n"
)


def same(some: dict, others: dict) -> bool:
    return some.keys() == others.keys() and all(
        np.array_equal(some[n], others[n], equal_nan=True) for n in some
    )


def test_what_columns_are():
    read, refused, lines = columns_reference(STRANGE, 100)
    assert (refused, lines) == ([3, 5, 6, 9], 10)
    assert read["iteration"].tolist()[:5] == [1, 2, 3, 4, 6]
    assert read["loss"].tolist()[2:4] == [-math.inf, 8.0]
    assert math.isnan(read["loss"][1])
    assert read["deep.b.c"][0] == 1.0
    assert [read[f"deep.few.{i}"][1] for i in (0, 1, 3)] == [1.0, 2.5, 4.0]
    assert "deep.few.4" not in read
    assert "text" not in read
    assert read["@list"][0] == 100.0
    assert read["@empty"][3] == 100 + STRANGE.index(b'{"iteration": 4')


@pytest.mark.skipif(compiled() is None, reason="the compiled helpers are not built")
def test_the_compiled_reader_is_a_twin():
    read = compiled()
    for text in (STRANGE, STRANGE * 3, b"\n", b"{}\n", b'{"a": [[1], {"b": [2]}]}\n'):
        first, second = columns_reference(text, 7), read(text, 7)
        assert same(first[0], second[0])
        assert first[1:] == second[1:]
    draw = np.random.Generator(np.random.Philox(key=1))
    numbers = [float(x) for x in draw.normal(size=200) * 10.0 ** draw.integers(-300, 300, 200)]
    text = "".join(json.dumps({"iteration": i, "x": x}) + "\n" for i, x in enumerate(numbers)).encode()
    assert read(text, 0)[0]["x"].tolist() == numbers


def write(path, *lines: object) -> None:
    with path.open("ab") as file:
        file.writelines(x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines)


def test_damage_is_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "m.jsonl"
    write(
        path,
        record(1),
        b"rubbish\n",
        {"no": 1},
        b"[]\n",
        b"\0\0\n",
        b'{"iteration": "x"}\n',
        record(2),
        b'{"iter',
    )
    lines = Lines(path)
    assert lines.update()
    assert lines.columns["iteration"].tolist() == [1, 2]
    starts = [
        f"{path}, line {number} {why}"
        for number, why in [
            (2, "is not JSON: "),
            (3, "has no `iteration`"),
            (4, "is not an object"),
            (5, "is not JSON: "),
            (6, "has no `iteration`"),
            (8, "has no end: "),
        ]
    ]
    assert len(lines.damage) == len(starts)
    assert all(line.startswith(begin) for line, begin in zip(lines.damage, starts, strict=True)), lines.damage


def test_many_damaged_lines_are_counted(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, record(1), *[b"rubbish\n"] * 500)
    lines = Lines(path)
    lines.update()
    assert len(lines.damage) == 21
    assert lines.damage[-1] == f"{path} has 500 damaged lines in all"


def test_only_what_was_added_is_read(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    write(path, record(1), record(2), b'{"iteration": 3, ')
    lines, spans = Lines(path), []
    honest = module._parsed
    monkeypatch.setattr(module, "_parsed", lambda file, span: spans.append(span) or honest(file, span))
    assert lines.update()
    whole = spans[-1][1]
    assert not lines.update()
    write(path, b'"lm_loss": 4}\n', record(4))
    assert lines.update()
    assert [span[0] for span in spans] == [0, whole]
    assert lines.columns["iteration"].tolist() == [1, 2, 3, 4]
    assert lines.columns["lm_loss"][2] == 4.0
    assert lines.damage == []


def test_a_file_that_a_rollback_wrote_anew_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, *map(record, range(1, 6)))
    lines = Lines(path)
    lines.update()
    write(tmp_path / "new", record(1), *(record(i, lm_loss=9) for i in range(2, 9)))  # it has grown since
    (tmp_path / "new").replace(path)
    assert lines.update()
    assert lines.columns["lm_loss"].tolist()[1:] == [9.0] * 7


def test_steps_that_are_there_twice_count_as_they_were_last(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, *map(record, (1, 2, 3)), record(2, lm_loss=7.0), record(3, lm_loss=8.0))
    lines = Lines(path)
    lines.update()
    assert lines.columns["iteration"].tolist() == [1, 2, 3]
    assert lines.columns["lm_loss"].tolist()[1:] == [7.0, 8.0]


@pytest.mark.parametrize("native", [True, False])
def test_pieces_of_any_size_give_the_same(tmp_path, monkeypatch, native):
    if not native:
        monkeypatch.setattr(module, "compiled", lambda: None)
    path = tmp_path / "m.jsonl"
    steps = [record(i, **({"rank_seconds": {"own": [i, 2, 3]}} if i % 3 == 0 else {})) for i in range(1, 30)]
    write(path, *steps, b'{"half')
    results = []
    for size in (2**23, 50, 401, 1000):
        monkeypatch.setattr(module, "CHUNK", size)
        lines = Lines(path)
        lines.update()
        results.append((lines.columns, lines.damage))
    assert all(same(results[0][0], other[0]) and results[0][1] == other[1] for other in results)
    assert results[0][0]["rank_seconds.own.0"][2] == 3.0


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(
        DataError, match=r"`RUN` must be a run's folder or a file of metrics, but .*; check the path"
    ):
        Lines(tmp_path / "none.jsonl").update()
