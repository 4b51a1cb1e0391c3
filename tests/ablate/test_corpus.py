"""The quickstart's corpus: made once, with the quickstart's tools and settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megazero.ablate import corpus
from megazero.ablate.corpus import Corpus
from megazero.errors import DataError
from tests.source_tree import ROOT

FILES = {
    "make_corpus": ("corpus.jsonl",),
    "train_tokenizer": ("tokenizer/tokenizer.json",),
    "preprocess_data": ("stdlib_text_document.bin", "stdlib_text_document.idx"),
}


@pytest.fixture
def tools(monkeypatch, tmp_path) -> list[list[str]]:
    """The calls of tools, which leave empty files."""
    calls = []

    def run(tool: str, *arguments: object) -> None:
        calls.append([tool, *map(str, arguments)])
        for name in FILES[tool]:
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("")
            os.utime(path, (len(calls), len(calls)))

    monkeypatch.setattr(corpus, "_run", run)
    return calls


def test_everything_is_made_once(tools, tmp_path):
    Corpus(tmp_path).prepare()
    Corpus(tmp_path).prepare()
    assert [call[0] for call in tools] == ["make_corpus", "train_tokenizer", "preprocess_data"]
    os.utime(tmp_path / "corpus.jsonl", (99, 99))  # another corpus: all that is made from it is old
    Corpus(tmp_path).prepare()
    assert [call[0] for call in tools[3:]] == ["train_tokenizer", "preprocess_data"]


def test_what_is_missing_is_made_again(tools, tmp_path):
    Corpus(tmp_path).prepare()
    (tmp_path / "stdlib_text_document.bin").unlink()
    Corpus(tmp_path).prepare()
    assert [call[0] for call in tools[3:]] == ["preprocess_data"]


def test_settings_are_those_of_the_quickstart(tools, tmp_path):
    """Each flag and value stands in the quickstart's script; files aside."""
    script = (ROOT / "scripts/quickstart.sh").read_text(encoding="utf-8")
    Corpus(tmp_path).prepare()
    words = [word for call in tools for word in call if not word.startswith(str(tmp_path))]
    assert {word for word in words if word not in script} <= {str(os.cpu_count())}
    assert tools[1][-2:] == ["--vocab-size", "8192"]
    assert "--append-eod" in tools[2]
    assert all(word in script for word in Corpus(Path("x")).flags if word.startswith("--"))


def test_a_tool_that_fails_is_named(capfd):
    with pytest.raises(DataError, match="`data_tools/make_corpus.py` must make the corpus, but ended with"):
        corpus._run("make_corpus", "--output", "x", "--nonsense")
    assert "--nonsense" in capfd.readouterr().err
