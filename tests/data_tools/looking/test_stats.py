from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_tools.looking.stats import main
from tests.tables import over_table

BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
EOD = 256


def write(path: Path, texts: list[str], dtype: type = np.uint16) -> str:
    with IndexedDatasetWriter(str(path), dtype) as writer:
        for text in texts:
            writer.add_document([np.array([*text.encode(), EOD])] if text else [])
    return str(path)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    one = write(tmp_path / "one", ["hello", "you", "", "hello", "héé"])
    return [one, write(tmp_path / "two", ["you", "other", ""], np.int32)]


def test_facts_as_json(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Documents equal each other whatever type their ids are stored in; empty ones equal none."""
    assert main([*two, "--json", *BYTES]) == 0
    facts = json.loads(capsys.readouterr().out)
    one, other = facts.pop("sources")
    assert facts.pop("histogram") == [[0, 0, 2], [1, 1, 0], [2, 3, 0], [4, 7, 6]]
    used = sorted(set(b"helloyouhelloother") | set("é".encode()) | {EOD})
    unused = [number for number in range(257) if number not in used]
    assert facts == {
        "documents": 8, "sequences": 6, "tokens": 32, "mean_length": 4.0,
        "lengths": {"p0": 0, "p5": 0, "p25": 0, "p50": 4, "p75": 6, "p95": 6, "p99": 6, "p100": 6},
        "ids": {
            "vocabulary": 257, "used": len(used), "never_used": len(unused),
            "first_never_used": unused[:20], "tokens_outside": 0,
        },
        "end_of_document": {"id": EOD, "share_of_tokens": 6 / 32, "share_of_documents": 1.0},
        "duplicates": {"documents": [1, 1], "tokens": 10, "texts": 2, "largest": 2, "example": [two[0], 0]},
    }  # fmt: skip
    assert (one["prefix"], one["documents"], one["sequences"], one["tokens"]) == (two[0], 5, 4, 22)
    assert (one["share"], other["share"]) == (22 / 32, 10 / 32)
    assert (one["ids_used"], other["ids_used"]) == (9, 8)
    assert one["bytes_per_token"] == {"mean": 1.0, "documents": 5, "tokens": 18}


def test_facts_for_people(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*two, "--vocab-size", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [two[0], "5", "4", "22", "68.75%", "6", "6", "6", "9", "1", "(20.00%)"]
    assert "8 documents, 32 tokens" in lines
    assert lines[6].startswith("ids: 11 of 100 occur; 100 never do (0, 1, 2, 3, ")
    assert lines[7] == "32 tokens are outside the vocabulary"
    assert "end of document: id 256 ends 100.00% of documents, and is 18.75% of tokens" in lines
    equal = "2 documents with 10 tokens equal an earlier one; of 2 such texts"
    assert (
        f"duplicates: {equal}, the most frequent is there 2 times, first as document 0 of {two[0]}" in lines
    )


def test_fast_reads_no_token(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*two, "--fast", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert not facts.keys() & {"ids", "duplicates", "end_of_document"}
    assert (facts["tokens"], facts["sources"][1]["share"]) == (32, 10 / 32)


def test_ids_without_a_vocabulary_count_up_to_the_largest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path / "d", ["\x00\x02", "\x01"]), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    ids = {"vocabulary": None, "used": 4, "never_used": 253, "first_never_used": list(range(3, 23))}
    assert facts["ids"] == {**ids, "tokens_outside": 0}
    assert facts["duplicates"] == {
        **{"documents": [0], "tokens": 0, "texts": 0, "largest": 0, "example": None}
    }


def test_empty_documents_end_with_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetWriter(str(tmp_path / "d"), np.uint16) as writer:
        for ids in ([1, 2], [], [3, 4], [2, 4]):
            writer.add_document([np.array(ids)] if ids else [])
    assert main([str(tmp_path / "d"), "--json"]) == 0
    end = json.loads(capsys.readouterr().out)["end_of_document"]
    assert end == {"id": 4, "share_of_tokens": 2 / 6, "share_of_documents": 2 / 3}


def test_the_sample_that_is_decoded_is_seeded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "d", ["é" * number for number in range(1, 40)])
    means = []
    for seed in ("1", "1", "2"):
        assert main([prefix, "--json", "--sample-documents", "3", "--seed", seed, *BYTES]) == 0
        means.append(json.loads(capsys.readouterr().out)["sources"][0]["bytes_per_token"])
    assert means[0] == means[1] != means[2]
    assert [mean["documents"] for mean in means] == [3, 3, 3]


def test_an_empty_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "d", [])
    assert main([prefix]) == 0
    assert "0 documents, 0 tokens" in capsys.readouterr().out
    assert main([prefix, "--json", *BYTES]) == 0
    assert json.loads(capsys.readouterr().out)["end_of_document"]["share_of_tokens"] == 0


def test_ids_that_no_vocabulary_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetWriter(str(tmp_path / "d"), np.int64) as writer:
        writer.add_document([np.array([3, 1 << 40])])
    assert main([str(tmp_path / "d")]) == 1
    assert "`token ids` of" in capsys.readouterr().err


@over_table(
    ("words", "status", "says"),
    [
        (["nowhere"], 1, "nowhere.idx` must be a readable file"),
        (["s3:/bucket/x"], 1, "must be a readable file"),
        ([], 2, "the following arguments are required: PREFIX"),
        (["x", "--sample-documents", "0"], 2, "must be at least 1"),
        (["x", "--vocab-size", "-1"], 2, "must be at least 1, but is -1"),
        (["x", "--picture", "nowhere/x.png"], 2, "in a folder, but is nowhere/x.png"),
    ],
)
def test_wrong_input(capsys: pytest.CaptureFixture[str], words: list[str], status: int, says: str) -> None:
    try:
        ended = main(words)
    except SystemExit as end:
        ended = int(end.code or 0)
    assert ended == status
    assert says in capsys.readouterr().err.replace("\n", " ")
