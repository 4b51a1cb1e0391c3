"""`megazero data`: its tools, the same as the scripts of a checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero import cli
from megazero.commands import data
from tests.source_tree import ROOT, Source

SCRIPTS = {
    "preprocess": "preprocess_data",
    "conversations": "conversations",
    "train-tokenizer": "train_tokenizer",
    "inspect": "inspect_dataset",
    "plan": "looking/plan",
    "stats": "looking/stats",
    "show": "looking/show",
    "validate": "looking/validate",
    "merge": "merge_datasets",
    "analyze": "analyze_dataset",
    "corpus": "corpora/make_corpus",
    "corpus-prose": "corpora/make_prose",
    "corpus-lexnames": "corpora/make_lexnames",
}


def test_a_text_becomes_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "de"}\n', encoding="utf-8")
    source, prefix = str(tmp_path / "a.jsonl"), str(tmp_path / "a")
    flags = ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]
    assert cli.main(["data", "preprocess", "--input", source, "--output-prefix", prefix, *flags]) == 0
    capsys.readouterr()
    assert cli.main(["data", "inspect", f"{prefix}_text_document", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["documents"], facts["tokens"]) == (2, 7)


def test_an_error_is_one_sentence_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "merge", "--input", "nowhere", "--output-prefix", "x"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("words", [[], ["preproces"]])
def test_no_tool_and_an_unknown_one_are_errors(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["data", *words])
    assert end.value.code == 2
    assert "megazero data: error: " in capsys.readouterr().err


@pytest.mark.parametrize("tool", SCRIPTS)
def test_help_names_the_tool(capsys: pytest.CaptureFixture[str], tool: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["data", tool, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: megazero data {tool} ")


def test_each_tool_has_a_script_that_does_the_same() -> None:
    assert [name for name, _, _ in data._TOOLS] == list(SCRIPTS)
    paths = {
        path.relative_to(ROOT / "data_tools").with_suffix("") for path in (ROOT / "data_tools").rglob("*.py")
    }
    assert paths == {Path(script) for script in SCRIPTS.values()}
    for name, _, module in data._TOOLS:
        source = Source.read(ROOT / "data_tools" / f"{SCRIPTS[name]}.py")
        assert source.text.count("\n") < 15
        assert f"megazero.data_tools.{module}.main" in {imported.target for imported in source.imports()}
