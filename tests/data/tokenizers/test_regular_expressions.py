"""Regular expressions of a tokenizer.json that its library cannot take, or takes for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from tests.tables import over_table

BACKTRACKS = "(a+)+$"  # tries every way to divide a run of letters that something else ends
LONG = "a" * 40 + "!"


def loaded(folder: Path, **changed: object) -> Tokenizer:
    """A byte-level BPE without merges, of which a part is another."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    content = {**json.loads(backend.to_str()), **changed}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return build_tokenizer(TokenizerSpec("HFTokenizer", model=str(folder)))


def split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": "x"}


@over_table(
    ("pattern", "reason"),
    [
        ("(", "unmatched parenthesis"),
        ("a{100001}", "too big number for repeat range"),
        (r"(?<x>\g<x>a)", "never ending recursion"),
        ("(" * 20_000 + ")" * 20_000, "parse depth limit over"),
        ("(?<=a|(b", "unmatched parenthesis"),
    ],
)
@over_table("part", ["pre_tokenizer", "normalizer"])
def test_an_expression_that_is_none_is_refused_when_loaded(tmp_path, pattern, reason, part):
    value = split(pattern) if part == "pre_tokenizer" else replace(pattern)
    with pytest.raises(
        DataError, match=rf"must be a tokenizer.json, but .*tokenizer.json is not \(.*{reason}"
    ):
        loaded(tmp_path, **{part: value})


@pytest.mark.parametrize(
    "change", [{"pre_tokenizer": split(BACKTRACKS)}, {"normalizer": replace(BACKTRACKS)}]
)
def test_an_expression_that_backtracks_without_end_is_an_error(tmp_path, change):
    """The library gives up after ten million tries, by a panic, which is no Exception."""
    tokenizer = loaded(tmp_path, **change)
    assert len(tokenizer.encode("hello")) > 0
    for act in (tokenizer.encode, lambda text: tokenizer.encode_batch(["hello", text])):
        with pytest.raises(DataError, match=rf"retry-limit-in-match over, with {tmp_path}/tokenizer.json\)"):
            act(LONG)
    assert len(tokenizer.encode("hello")) > 0


def test_panics_while_loading_are_errors(tmp_path):
    prefixed = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    with pytest.raises(DataError, match=r"must be a tokenizer.json, but .*out of range for slice"):
        loaded(tmp_path, model={**prefixed, "continuing_subword_prefix": "long"})


def test_a_damaged_map_of_characters_is_an_error(tmp_path):
    tokenizer = loaded(
        tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "EAAAAP////8AAAAA/////wAAAAA="}
    )
    with pytest.raises(DataError, match=f"index out of bounds.*, with {tmp_path}"):
        tokenizer.encode("hello")


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_preprocessing_names_the_line(tmp_path, capsys, workers, mode):
    from megazero.data_tools.preprocess_data import main

    loaded(tmp_path, pre_tokenizer=split(BACKTRACKS))
    rows = [{"text": "hello"}] * 3 + [{"text": LONG}, {"text": "world"}]
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--input", str(tmp_path / "f.jsonl"), "--output-prefix", str(tmp_path / "p")]
    flags += ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(tmp_path)]
    assert main([*flags, "--workers", workers, "--on-error", mode]) == (1 if mode == "stop" else 0)
    assert "f.jsonl, line 4: not tokenizable: key `text`: text must have tokens" in capsys.readouterr().err
    assert (tmp_path / "p_text_document.idx").exists() == (mode == "skip")
