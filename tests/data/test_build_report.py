"""A build of minutes was silent: two minutes for 4e8 samples, in which nobody knew what a job waited for."""

from __future__ import annotations

import numpy as np
import pytest

from megazero.data import build_report
from megazero.data.bert.dataset import BERTSettings
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.blended import BlendedDataset
from megazero.data.build_report import BuildReport, ProgressLog
from megazero.data.from_config import BERTBuilder, GPTBuilder
from megazero.data.gpt_dataset import GPTSettings
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.indexed.writer import IndexedDatasetWriter

GPT = GPTBuilder(GPTSettings(sequence_length=8))
BERT = BERTBuilder(BERTSettings(sequence_length=24, words=WordPieces.numbered(60)))


@pytest.fixture
def indexed(tmp_path) -> IndexedDataset:
    with IndexedDatasetWriter(tmp_path / "d", "uint16") as writer:
        for _ in range(20):
            writer.add_document([np.arange(5, 17), np.arange(5, 25)])
    return IndexedDataset(tmp_path / "d")


@pytest.fixture
def impatient(monkeypatch) -> None:
    """As if every build took seconds."""
    monkeypatch.setattr(build_report, "_SILENT_SECONDS", 0.0)


def test_a_gpt_index_says_each_step(indexed, impatient, capsys):
    dataset = GPT.build(indexed, range(len(indexed)), 100, "train", None)
    what = f"index of the train split of {indexed.prefix}"
    assert capsys.readouterr().err.splitlines() == [
        f"building the {what}: {len(dataset)} samples, which takes about 0 s",
        f"building the {what}: the order of the sequences, step 1 of 3, after 0 s",
        f"building the {what}: where each sample begins, step 2 of 3, after 0 s",
        f"building the {what}: the order of the samples, step 3 of 3, after 0 s",
        f"built the {what} in 0 s",
    ]


def test_a_sample_map_and_a_blend_say_what_is_built(indexed, impatient, capsys):
    BERT.build(indexed, range(20), 100, "valid", None)
    BERT.build(indexed, range(20), None, "test", 2)  # how many samples is only known afterwards
    what = f"sample map of the valid split of {indexed.prefix}"
    map_of_test = f"sample map of the test split of {indexed.prefix}"
    assert capsys.readouterr().err.splitlines() == [
        f"building the {what}: 100 samples, which takes about 0 s",
        f"built the {what} in 0 s",
        f"building the {map_of_test}: {2 * 20 * 32 // 21 + 1} samples, which takes about 0 s",
        f"built the {map_of_test} in 0 s",
    ]
    dataset = GPT.build(indexed, range(len(indexed)), 100, "train", None)
    capsys.readouterr()
    BlendedDataset([dataset, dataset], [1, 2], 60)
    assert capsys.readouterr().err.splitlines() == [
        "building the index of the train blend: 60 samples, which takes about 0 s",
        "built the index of the train blend in 0 s",
    ]


def test_what_comes_from_a_cache_is_not_built(indexed, impatient, tmp_path, capsys):
    builder = GPTBuilder(GPTSettings(sequence_length=8, cache_dir=tmp_path / "cache"))
    builder.build(indexed, range(len(indexed)), 100, "train", None)
    assert "built the index" in capsys.readouterr().err
    builder.build(indexed, range(len(indexed)), 100, "train", None)
    assert capsys.readouterr().err == ""


def test_a_short_build_and_other_ranks_of_the_machine_are_silent(indexed, monkeypatch, capsys):
    GPT.build(indexed, range(len(indexed)), 100, "train", None)
    monkeypatch.setattr(build_report, "_SILENT_SECONDS", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    GPT.build(indexed, range(len(indexed)), 100, "train", None)
    assert capsys.readouterr().err == ""


def test_a_build_of_400_million_samples_is_announced_with_a_forecast(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(build_report.time, "monotonic", lambda: now[0])
    with BuildReport("index of x", 400_000_000, 104.0) as report:
        now[0] = 9.0
        report.step("where each sample begins, step 2 of 3")
        now[0] = 118.0
    assert capsys.readouterr().err.splitlines() == [
        "building the index of x: 400,000,000 samples, which takes about 104 s",
        "building the index of x: where each sample begins, step 2 of 3, after 9 s",
        "built the index of x in 118 s",
    ]
    with BuildReport("index of y", 10, 0.1) as report:  # slower than was forecast
        report.step("the order of the sequences, step 1 of 3")
        now[0] += 7.0
        report.step("where each sample begins, step 2 of 3")
    assert capsys.readouterr().err.splitlines() == [
        "building the index of y: 10 samples",
        "building the index of y: where each sample begins, step 2 of 3, after 7 s",
        "built the index of y in 7 s",
    ]


def test_what_takes_long_says_how_far_it_is_in_few_lines(monkeypatch):
    """An evaluation of minutes was silent."""
    now, lines = [0.0], []
    monkeypatch.setattr(build_report.time, "monotonic", lambda: now[0])
    for _ in ProgressLog(lines.append, "evaluating on validation").over(range(3600), 3600):
        now[0] += 1.0
    assert [line.split()[3] for line in lines] == [
        "5",
        "10",
        "20",
        "40",
        "80",
        "160",
        "320",
        "640",
        "1280",
        "2560",
    ]
    assert lines[0] == "evaluating on validation: 5 of 3600 batches, after 5 s"
    short: list[str] = []
    assert list(ProgressLog(short.append, "x").over("ab", 2)) == ["a", "b"]
    assert short == []
