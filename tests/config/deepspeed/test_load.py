"""A broken JSON: the complaint says what is wrong with it, where, and what to do."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from megazero.config.deepspeed.load import load_json
from tests.tables import over_table


def complaints(text: str | bytes, tmp_path: Path) -> list[str]:
    """Why a file with this text is refused, without its path."""
    file = tmp_path / "ds.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [line.removeprefix(str(file)) for line in load_json(file)[1]]


@over_table(
    ("text", "where", "fault"),
    [
        ('{"NaN": "NaN",\n "a": NaN}', "2:7", "NaN is no number there; write a finite number"),
        ('{"a": -Infinity}', "1:7", "-Infinity is no number there; write a finite number"),
        ('{"a": True}', "1:7", "`True` is no value there; write true"),
        ('{"a": None}', "1:7", "`None` is no value there; write null"),
        ('{"a": nan}', "1:7", "`nan` is no value there; write a number"),
        ('{"a": CONFIG_GBSIZE}', "1:7", "`CONFIG_GBSIZE` is a placeholder or has no quotes; write the value"),
        ('{"a": ${GBSIZE}}', "1:7", "`${GBSIZE}` is a placeholder or has no quotes; write the value itself"),
        ('{"a": @GBSIZE@}', "1:7", "`@GBSIZE@` is a placeholder or has no quotes; write the value itself"),
        ('{"a": <size>}', "1:7", "`<size>` is a placeholder or has no quotes; write the value itself"),
        ('{"a": /* 1\n 2}', "1:7", "what begins there has no end; close it"),
        ("{'a': 'b\n}", "1:7", "what begins there has no end; close it"),
        ("{a: 'b', c: False,\n d: 1}", "1:13", "`False` is no value there; write false"),
        ("{a: 1, // one\n b: .5, c: 2}", "2:5", "`.5` is a placeholder or has no quotes; write the value"),
        ("{a: Infinity}", "1:5", "Infinity is no number there; write a finite number"),
        ('{"a": 1 "b": 2}', "1:9", "a comma or a closing bracket is missing; add it before this place"),
        ('{"a" 1}', "1:6", "a colon is missing after a key; add it before this place"),
        ('{"a": "b', "1:7", "a text has no closing quote; close it"),
        ('{"a": "b\nc"}', "1:9", "a text runs over the end of its line; close it, or write \\n"),
        ('{"a": "C:\\data"}', "1:10", "a backslash begins no escape that JSON knows; write two of them"),
        ('{"a": 1}\n{"b": 2}', "2:1", "something follows the object; remove it"),
        ('{"a": {"b": 1}\n', "1:15", "it ends before it is whole; close what is open"),
        ("a: 1\nb: False\n", "2:4", "`False` is no value there; write false"),
        (" \n", "1:1", "it is empty; write an object in braces"),
        ('{"a": ]}', "1:7", "the parser says: Expecting value; correct it"),
        ('{"a": 1' + "0" * 5000 + "}", "1:7", "a number has too many digits; write it shorter"),
    ],
)
def test_a_fault_has_a_place_and_a_name(text: str, where: str, fault: str, tmp_path: Path) -> None:
    (line,) = complaints(text, tmp_path)
    assert line.startswith(f":{where}: the file must be valid JSON, but {fault}")
    assert line.endswith(".")


@over_table(
    ("text", "means"),
    [
        ('{\n "a": 1,\n}', {"a": 1}),
        ('\ufeff{"a": 1}', {"a": 1}),
        ("# one\na: 1\n'b': {c: 2},\n\"d\": [3]\n", {"a": 1, "b": {"c": 2}, "d": [3]}),
        ('{"a": [1, 2,],}', {"a": [1, 2]}),
        ('{\n  // stage: "3\n "a": 1 # one\n}', {"a": 1}),
        ('{"a": /* 1\n "b": 3 */ 2}', {"a": 2}),
        ("{fp16: {enabled: true}, zero-1: 2}", {"fp16": {"enabled": True}, "zero-1": 2}),
        ("""{'a': 'it\\'s "b"', "c": "d'e"}""", {"a": 'it\'s "b"', "c": "d'e"}),
        ('{\n "a": 1\n "b": {"c": [1\n 2]}\n d: "x"\n}', {"a": 1, "b": {"c": [1, 2]}, "d": "x"}),
        ('{"path": "http://a#b/*c*/", "d": "a, }"}', {"path": "http://a#b/*c*/", "d": "a, }"}),
        ('{"a":\n 1,\n "b"\n: 2\n}', {"a": 1, "b": 2}),
    ],
)
def test_what_deepspeeds_reader_takes_beside_json(text: str, means: object, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    assert load_json(file) == (means, [])


def test_repeated_keys_are_found_however_they_are_written(tmp_path: Path) -> None:
    assert complaints("{a: 1, b: 'x', /* . */\n 'c': 2, a: 3}", tmp_path) == [
        ":2:10: `a` must be given once, but is given on line 1 too."
    ]


def test_a_text_in_base64_is_the_file_itself() -> None:
    def encoded(text: str) -> str:
        return base64.urlsafe_b64encode(text.encode()).decode()

    assert load_json(encoded('{"a": "\u00ff>?"}')) == ({"a": "\u00ff>?"}, [])
    (line,) = load_json(encoded('{"a": True}'))[1]
    assert line.startswith("the DeepSpeed configuration:1:7: the file must be valid JSON, but `True`")
    for text in ("abcd", encoded("no object"), "missing.json"):
        assert "must name a readable file" in load_json(text)[1][0]


def test_files_that_are_no_text(tmp_path: Path) -> None:
    assert complaints(b'{"a": "\xff"}', tmp_path) == [
        ": the file must be UTF-8, but has invalid start byte; save it as UTF-8."
    ]
    assert complaints("[1]", tmp_path) == [": the file must hold one JSON object."]


def test_repeated_keys_have_their_lines(tmp_path: Path) -> None:
    text = '{"a": {"b": 1, "c": {"b": 2}},\n "d": [{"b": 3}, {"b": "b", "\\u0062": 4}],\n "a": {}}'
    assert complaints(text, tmp_path) == [
        ":2:29: `b` must be given once, but is given on line 2 too.",
        ":3:2: `a` must be given once, but is given on line 1 too.",
    ]


def test_many_repeated_keys_are_counted(tmp_path: Path) -> None:
    lines = complaints("{" + ", ".join(['"a": 1'] * 5000) + "}", tmp_path)
    assert len(lines) == 21
    assert lines[-1] == ": there are 4,979 more repeated keys."


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"a": [1, {"b": None}]}))
    assert load_json(file) == ({"a": [1, {"b": None}]}, [])
