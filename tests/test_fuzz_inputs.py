"""The fuzz of input files: a small part of it runs here, and its harness can tell every outcome."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megazero.errors import DataError
from proofs.fuzz_inputs.harness import OUTCOMES, WRONG, Finding, Kind, Sample, make_case, run
from proofs.fuzz_inputs.mutate import as_yaml, message_fields, of_json, of_message, parsed, written

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("kinds", "count"), [(("yaml", "deepspeed", "tokenizer", "hf"), 50), (("sentencepiece",), 25)]
)
def test_changed_files_are_refused_in_words_or_mean_the_same(kinds, count, tmp_path):
    # In a process of its own, because its workers are forked.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "proofs.fuzz_inputs", "--kinds", *kinds),
            *("--count", str(count), "--jsonl", str(tmp_path / "found.jsonl")),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(lines) == len(kinds)
    for line in lines:
        assert line["cases"] == count
        assert {outcome: line[outcome] for outcome in WRONG if line[outcome]} == {}
        assert line["refused"] > count / 3, "the mutations must bite"
        assert line["accepted, same meaning"] > count / 10, "they must leave something to compare"


def _work() -> None:
    while True:
        pass


def _reader(folder: Path, sample: Sample) -> bytes:
    content = (folder / "f").read_bytes()
    if content == b"unprintable":
        error = DataError("`f` must be plain.")
        error.args = ("past the constructor: \x1b",)
        raise error
    if content == b"long":
        raise DataError("x" * 3000)
    if content == b"refused":
        raise DataError("`f` must be something else.")
    fates = {
        b"traceback": lambda: 1 / 0,
        b"hang": _work,
        b"wait": lambda: time.sleep(60),
        b"exit": lambda: sys.exit(0),
    }
    fates[b"crash"] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    fates.get(content, lambda: None)()
    return content


def _comparer(folder: Path, sample: Sample, found: bytes) -> str | None:
    if found == b"unreadable":
        raise ValueError("the other reader does not know this")
    return "it says something else" if found == b"changed" else None


def _findings(folder: Path, contents: Mapping[str, bytes]) -> dict[str, Finding]:
    """What becomes of these files, each of them the one mutation of a sample."""
    samples = [
        Sample(name, {"f": b"whole"}, {"f": (lambda data, rng, c=c: c,)}) for name, c in contents.items()
    ]
    kind = Kind("test", lambda folder: samples, _reader, _comparer)
    # The first round are the samples themselves; a seed is sought whose second has the mutations, not bytes.
    count = len(samples)
    seed = next(
        seed
        for seed in range(10**6)
        if all(make_case(samples, seed, count + i).files["f"] == c for i, c in enumerate(contents.values()))
    )
    found = list(run(kind, range(2 * count), seed, folder, limit=0.5))
    assert [each.outcome for each in found[:count]] == ["accepted, same meaning"] * count
    return {each.sample: each for each in found[count:]}


@pytest.mark.parametrize(
    ("content", "outcome", "detail"),
    [
        (b"same", "accepted, same meaning", ""),
        (b"refused", "refused", "`f` must be something else."),
        (b"changed", "accepted, changed meaning", "it says something else"),
        (b"unreadable", "accepted, changed meaning", "the other reader refuses"),
        (b"traceback", "traceback", "ZeroDivisionError"),
        (b"exit", "traceback", "SystemExit"),
        (b"hang", "hang", "no answer after 0.5 s"),
        (b"wait", "hang", "no answer after 0.5 s"),
        (b"crash", "crash", "status -9"),
        (b"unprintable", "unfit message", "it is not printable"),
        (b"long", "unfit message", "a line of 3000 characters"),
    ],
)
def test_every_outcome_is_told_and_the_next_case_runs(content, outcome, detail, tmp_path):
    found = _findings(tmp_path, {"first": content, "next": b"same"})
    assert found["first"].outcome == outcome
    assert detail in found["first"].detail
    assert found["next"].outcome == "accepted, same meaning"
    assert outcome in OUTCOMES


def test_a_sample_that_is_refused_is_an_error(tmp_path):
    kind = Kind("test", lambda folder: [Sample("s", {"f": b"refused"}, {"f": ()})], _reader, _comparer)
    (found,) = run(kind, [0], 1, tmp_path)
    assert (found.outcome, found.detail[:27]) == ("accepted, changed meaning", "the sample itself: refused:")


def test_cases_depend_on_seed_and_number_alone():
    sample = Sample("s", {"f": b'{"a": [1, {"b": "text"}], "c": 1.5}'}, {"f": (of_json,)})
    first = [make_case([sample], 7, number).files["f"] for number in range(200)]
    assert first == [make_case([sample], 7, number).files["f"] for number in range(200)]
    assert first != [make_case([sample], 8, number).files["f"] for number in range(200)]
    assert len(set(first)) > 150


def test_documents_and_messages_are_written_as_they_were_read():
    import random

    text = '{"a": [1, {"b": "t\\u00e9xt"}, null], "a": 2.5, "c": {}}'
    assert json.loads(written(parsed(text))) == json.loads(text)
    assert written(parsed(text)).count('"a"') == 2
    assert as_yaml(parsed('{"model": {"x": 1, "y z": [2]}, "data": {}}')) == (
        'model:\n  x: 1\n  "y z": [2]\ndata: {}\n'
    )
    # field 1: the text "hi"; field 2: the float 1.0; field 3: 300; field 4: a message with field 1 = 5
    message = b"\x0a\x02hi\x15\x00\x00\x80\x3f\x18\xac\x02\x22\x02\x08\x05"
    assert message_fields(message) == [(1, 2, b"hi"), (2, 5, 0x3F800000), (3, 0, 300), (4, 2, b"\x08\x05")]
    assert message_fields(message[:-1]) == []
    for seed in range(300):
        assert message_fields(of_message(message, random.Random(seed))) != [], seed
