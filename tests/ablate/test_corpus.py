"""The quickstart's corpus: made once, with the quickstart's tools and settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megazero.ablate import corpus
from megazero.ablate.corpus import Corpus
from megazero.ablate.study import StudyOptions, read_study
from megazero.ablate.trial import trials_of
from megazero.errors import DataError
from tests.ablate.samples import write_study
from tests.commands.test_data import SCRIPTS
from tests.source_tree import ROOT

FILES = {
    "gpt": {
        "corpus": ("corpus.jsonl",),
        "train-tokenizer": ("tokenizer/tokenizer.json",),
        "preprocess": ("stdlib_text_document.bin", "stdlib_text_document.idx"),
    },
    "bert": {
        "corpus-prose": ("prose.jsonl",),
        "train-tokenizer": ("wordpiece/vocab.txt",),
        "preprocess": ("kjv_text_sentence.bin", "kjv_text_sentence.idx"),
    },
}
families = pytest.mark.parametrize("family", FILES)


@pytest.fixture
def tools(monkeypatch, tmp_path) -> list[list[str]]:
    """The calls of tools, which leave empty files."""
    calls = []

    def run(tool: str, *arguments: object) -> None:
        calls.append([tool, *map(str, arguments)])
        family = "bert" if {"corpus-prose", "wordpiece", "--split-sentences"} & set(calls[-1]) else "gpt"
        for name in FILES[family].get(tool, ()):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("")
            os.utime(path, (len(calls), len(calls)))

    monkeypatch.setattr(corpus, "_run", run)
    return calls


@families
def test_everything_is_made_once(tools, tmp_path, family):
    corpus, (text, *_) = Corpus(tmp_path, family), FILES[family]
    corpus.prepare()
    corpus.prepare()
    assert [call[0] for call in tools] == [text, "train-tokenizer", "preprocess"]
    (name,) = FILES[family][text]
    os.utime(tmp_path / name, (99, 99))  # another corpus: all that is made from it is old
    corpus.prepare()
    assert [call[0] for call in tools[3:]] == ["train-tokenizer", "preprocess"]


def test_what_is_missing_is_made_again(tools, tmp_path):
    Corpus(tmp_path, "gpt").prepare()
    (tmp_path / "stdlib_text_document.bin").unlink()
    Corpus(tmp_path, "gpt").prepare()
    assert [call[0] for call in tools[3:]] == ["preprocess"]


@families
def test_settings_are_those_of_the_quickstart(tools, tmp_path, family):
    """Each flag and value stands in the quickstart's script; files aside, and a study's larger vocabulary."""
    script = (ROOT / "scripts/quickstart.sh").read_text(encoding="utf-8")
    Corpus(tmp_path, family).prepare()
    words = [word for call in tools for word in call[1:] if not word.startswith(str(tmp_path))]
    assert all(f"data_tools/{SCRIPTS[tool]}.py" in script for tool, *_ in tools)
    assert {word for word in words if word not in script} <= {str(os.cpu_count()), "8192"}
    assert tools[1][-2:] == ["--vocab-size", {"gpt": "8192", "bert": "4096"}[family]]
    assert {"gpt": "--append-eod", "bert": "--split-sentences"}[family] in tools[2]
    assert all(word in script for word in Corpus(Path("x"), family).flags if word.startswith("--"))


def test_a_tool_that_fails_is_named(capfd):
    with pytest.raises(DataError, match="`megazero data corpus` must make the corpus"):
        corpus._run("corpus", "--output", "x", "--nonsense")
    assert "--nonsense" in capfd.readouterr().err


def rarity_study(folder: Path) -> Path:
    """A member by the rarity of its words, which names no index."""
    metric = """
data: {train_data_exact_num_epochs: 1, split: '96,4,0'}
data_sampling:
  curriculum_metrics:
    vocab_rarity:
      difficulty_type: percentile
      min_difficulty: 50
      schedule_type: fixed_linear
      schedule_config: {total_curriculum_step: 2}
"""
    study = write_study(folder, rare=metric)
    base = study / "base.yaml"
    base.write_text(base.read_text(encoding="utf-8").replace("mock_data: true, ", ""), encoding="utf-8")
    return study


def test_a_curriculum_without_an_index_gets_that_of_its_seed(tools, tmp_path):
    """Numbers of samples mean something for one order of the documents only."""
    flags = Corpus(tmp_path / "corpus", "gpt").flags
    study = read_study(rarity_study(tmp_path / "s"), StudyOptions(corpus={"gpt": flags}))
    trials = trials_of(study.members, 2, 1, tmp_path)
    found = []
    for trial in trials:
        (metric,) = trial.config().data_sampling.curriculum_metrics
        found.append(metric.index_to_sample_path)
        assert metric.difficulty_type == "percentile"
        trial.corpus.analyze(trial.to_analyze, trial.config())
    name = "analysis/gpt-length-8-split-96-4-0-seed-{}-epochs-1/vocab_rarity/vocab_rarity_index_to_sample"
    assert found == [str(tmp_path / "corpus" / name.format(seed)) for seed in (1234, 1235)]
    for call, seed in zip(tools, ("1234", "1235"), strict=True):
        assert call[:4] == ["analyze", "--metric", "total_vocab_freq", "vocab_rarity"]
        assert call[call.index("--seed") + 1] == seed
