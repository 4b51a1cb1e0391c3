from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.data.blended import BlendedDataset
from megazero.data.build import DatasetRequest, DataSources, build_datasets
from megazero.data.from_config import GPTBuilder
from megazero.data.gpt_dataset import GPTSettings
from megazero.data_tools.looking import plan
from megazero.data_tools.looking.plan import main
from tests.data_tools.looking.conftest import Write
from tests.tables import over_table

LENGTHS = {
    "a": [7, 1, 30, 12, 0, 5, 9, 44, 3, 8, 21, 17, 2, 6, 11] * 4,
    "b": [250, 13, 90],
    "c": [5] * 30 + [0, 61],
}


@pytest.fixture
def prefixes(write: Write) -> dict[str, str]:
    return {name: write(name, lengths) for name, lengths in LENGTHS.items()}


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def trained(blend: list[str], samples: int, split: str, seed: int) -> list[dict[str, Any]]:
    """What a training on the blend reads, token by token: ids are places in the file."""
    builder = GPTBuilder(GPTSettings(16, seed))
    sources = DataSources(data_path=tuple(blend), split=split)
    dataset = build_datasets(DatasetRequest(builder, (samples, 0, 0), sources))[0]
    assert dataset is not None
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    rows: list[dict[str, Any]] = [{"samples": 0, "first_repeat": None} for _ in parts]
    seen: list[set[int]] = [set() for _ in parts]
    for number in range(min(samples, len(dataset))):
        sample = dataset[number]
        source = int(sample.get("dataset_id", 0))
        tokens = sample["tokens"].tolist()
        if rows[source]["first_repeat"] is None and seen[source].intersection(tokens):
            rows[source]["first_repeat"] = number
        rows[source]["samples"] += 1
        seen[source].update(tokens)
    for row, part, tokens in zip(rows, parts, seen, strict=True):
        sequences = [set(part.indexed[i].tolist()) for i in part._ids]
        row["unseen_tokens"] = len(set().union(*sequences) - tokens)
        row["unseen_sequences"] = sum(bool(ids) and not ids & tokens for ids in sequences)
    return rows


CASES = [
    ("a", 3, "1"),
    ("a", 24, "1"),
    ("a", 60, "969,30,1"),
    ("a", 47, "1"),
    ("1 a 1 b", 30, "1"),
    ("0.7 a 0.2 b 0.1 c", 100, "1"),
    ("0.7 a 0.2 b 0.1 c", 101, "8,1,1"),
    ("a b c", 1000, "1"),
    ("a b c", 20, "1"),
    ("0.3 a[0:0.5] 0.7 a[0.5:1]", 33, "1"),
    ("2 c 0 b 1 c 3 a", 77, "9,1,0"),
]


@over_table(("blend", "samples", "split"), CASES)
def test_a_plan_is_what_a_training_reads(
    prefixes: dict[str, str], capsys: pytest.CaptureFixture[str], blend: str, samples: int, split: str
) -> None:
    words = []
    for word in blend.split():
        name, bracket, part = word.partition("[")
        words.append(prefixes.get(name, name) + bracket + part)
    for seed in (1234, 7):
        flags = ["--seq-length", "16", "--samples", str(samples), "--split", split, "--seed", str(seed)]
        facts = planned(capsys, *words, *flags, "--global-batch-size", "4")
        expected = trained(words, samples, split, seed)
        for row, right in zip(facts["sources"], expected, strict=True):
            assert {key: row[key] for key in right} == right
            assert row["exact"] is True
            first = right["first_repeat"]
            assert row["first_repeat_step"] == (None if first is None else first // 4 + 1)
            assert row["epochs"] == pytest.approx(right["samples"] * 16 / row["tokens"])
        assert facts["samples"] == sum(row["samples"] for row in expected)


def test_without_an_index_the_plan_is_near_it(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over seeds of the first repeat, and what is never seen, as estimated and as counted."""
    lengths = np.random.default_rng(0).geometric(1 / 60, 2000).tolist()
    prefix = write("x", lengths)
    flags = [prefix, "--seq-length", "32", "--split", "1", "--samples", "7000"]
    counted = [planned(capsys, *flags, "--seed", str(seed))["sources"][0] for seed in range(8)]
    monkeypatch.setattr(plan, "_INDEX_LIMIT", 0)
    (estimated,) = planned(capsys, *flags)["sources"]
    assert (estimated["exact"], counted[0]["exact"]) == (False, True)
    assert counted[0]["epochs"] > 1.8
    mean = np.mean([row["first_repeat"] for row in counted])
    assert estimated["first_repeat"] == pytest.approx(mean, rel=0.35)
    assert estimated["unseen_tokens"] == pytest.approx(
        np.mean([r["unseen_tokens"] for r in counted]), rel=0.2
    )
    assert planned(capsys, *flags, "--exact")["sources"][0]["exact"] is True
    once = [prefix, "--seq-length", "32", "--split", "1", "--samples", "1500"]
    (row,) = planned(capsys, *once)["sources"]
    assert (row["first_repeat"], row["unseen_tokens"]) == (None, sum(lengths) - 1500 * 32)


def test_a_long_order_is_planned_without_being_made(
    prefixes: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right to within the number of sources, and to a billion samples at once."""
    words = ["0.7", prefixes["a"], "0.2", prefixes["b"], "0.1", prefixes["c"], "--seq-length", "16"]
    exact = planned(capsys, *words, "--samples", "101")
    monkeypatch.setattr(plan, "_ORDER_LIMIT", 100)
    near = planned(capsys, *words, "--samples", "101")
    for row, right in zip(near["sources"], exact["sources"], strict=True):
        assert abs(row["samples"] - right["samples"]) <= 3
        assert row["exact"] is False
        assert abs((row["first_repeat"] or 0) - (right["first_repeat"] or 0)) <= 3 / row["share"]
    huge = planned(capsys, *words, "--samples", "1e9")
    assert [row["samples"] for row in huge["sources"]] == [700_000_000, 200_000_000, 100_000_000]


def test_the_table(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a", [40] * 10), write("b", [15])
    words = ["0.75", a, "0.25", b, "--seq-length", "8", "--tokens", "240", "--global-batch-size", "5"]
    assert main([*words, "--split", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "30 samples of 8 tokens: 240 tokens, 6 steps of 5"
    assert lines[2].split("  ")[0] == "source"
    one, other = (line.split(None, 6) for line in lines[3:5])
    assert one == [a, "75.000%", "73.333%", "22", "400", "0.440", "never  56.0% of tokens"]
    assert other == [b, "25.000%", "26.667%", "8", "15", "4.267", "step 2  nothing"]


def test_a_blend_that_ends_early_says_so(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a", [40] * 10), write("b", [60])
    assert main([a, b, "--seq-length", "8", "--samples", "1000", "--split", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("56 samples of 8 tokens: 448 tokens\n")
    assert "The blend ends before the 1,000 samples that are asked for" in out


def test_a_file_with_a_blend(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a", [40] * 10), write("b", [60])
    (tmp_path / "blend.txt").write_text(f"3 {a}\n1 {b}\n")
    flags = ["--seq-length", "8", "--samples", "20"]
    plain = planned(capsys, "3", a, "1", b, *flags)
    assert planned(capsys, f"@{tmp_path}/blend.txt", *flags) == plain
    assert planned(capsys, "--data-args-path", f"{tmp_path}/blend.txt", *flags) == plain


SIZES = ["--seq-length", "8", "--samples", "20"]
WRONG = [
    (["nowhere", *SIZES], 1, "`data_path` must name datasets, but nowhere.idx is not a file"),
    (["s3:/bucket/x", *SIZES], 1, "s3:/bucket/x.idx is not a file"),
    (["PREFIX", "3", *SIZES], 1, "`weight` in `data_path` must be a number"),
    (["1", "PREFIX", "PREFIX", *SIZES], 1, "give every prefix a weight"),
    (["-1", "PREFIX", *SIZES], 1, "must be a number of at least 0, but is '-1'"),
    (["PREFIX[0.5:0.1]", *SIZES], 1, "is not a file"),
    (["@nowhere", *SIZES], 1, "a file with a blend must be readable text"),
    (["DAMAGED", *SIZES], 1, "damaged.idx"),
    (["EMPTY", *SIZES], 1, "the train split must have samples"),
    (["PREFIX", "--seq-length", "8"], 2, "--tokens --samples is required"),
    (["PREFIX", *SIZES, "--tokens", "20"], 2, "not allowed with argument"),
    (["PREFIX", "--seq-length", "-8", "--samples", "20"], 2, "must be at least 1"),
    (["PREFIX", "--seq-length", "8", "--samples", "-20"], 2, "whole number of at least 1"),
    (["PREFIX", "--seq-length", "8", "--tokens", "1e999"], 2, "whole number of at least 1"),
    (["PREFIX", *SIZES, "--global-batch-size", "0"], 2, "must be at least 1"),
    (["PREFIX", *SIZES, "--split", "x"], 1, "`split` must be numbers"),
    (["PREFIX", *SIZES, "--split", "0,1,0"], 1, "the train split must have samples"),
    (["PREFIX", *SIZES, "--picture", "x.gif"], 2, "must end in .png or .svg or .pdf"),
    (["PREFIX", *SIZES, "--data-args-path", "x"], 2, "exactly one of BLEND and `--data-args-path`"),
    (SIZES, 2, "exactly one of BLEND and `--data-args-path`"),
]


@pytest.fixture
def named(write: Write) -> dict[str, str]:
    named = {"PREFIX": write("p", [40] * 4), "EMPTY": write("empty", []), "DAMAGED": write("damaged", [9])}
    Path(f"{named['DAMAGED']}.idx").write_bytes(b"MMIDIDX\x00\x00 and then no index")
    return named


@pytest.mark.filterwarnings("ignore:the train split is empty")
@over_table(("words", "status", "says"), WRONG)
def test_wrong_input_is_one_sentence(
    named: dict[str, str], capsys: pytest.CaptureFixture[str], words: list[str], status: int, says: str
) -> None:
    try:
        ended = main([named.get(word, word) for word in words])
    except SystemExit as end:
        ended = int(end.code or 0)
    error = capsys.readouterr().err
    assert ended == status
    assert says in error.replace("\n", " ")
