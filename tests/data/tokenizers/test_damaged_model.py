"""SentencePiece models that are damaged: refused in words, whatever they do to the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megazero.data.tokenizers import sentence_piece
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from tests.source_tree import ROOT


@pytest.mark.parametrize("kind", ["GPTSentencePieceTokenizer", "SentencePieceTokenizer"])
def test_a_piece_that_is_no_text_is_refused(unigram_model, tmp_path, kind):
    content = Path(unigram_model).read_bytes()
    assert content.count("ï".encode()) > 0
    (tmp_path / "m.model").write_bytes(content.replace("ï".encode(), b"\xc3("))
    with pytest.raises(DataError, match=r"must be a SentencePiece model, but .*m.model is not \(.*utf-8"):
        build_tokenizer(TokenizerSpec(kind, model=str(tmp_path / "m.model")))


@pytest.mark.parametrize("content", [b"", b"\x0a", b"not a model", b"\x0a\x05\x0a\x03abc"])
def test_what_is_no_model_is_refused(tmp_path, content):
    (tmp_path / "m.model").write_bytes(content)
    with pytest.raises(DataError, match=r"must be a SentencePiece model, but .*m.model is not \(.+\)"):
        build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=str(tmp_path / "m.model")))


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("while True: pass", "loading it takes more than 1 s"),
        ("import os; os.abort()", "loading it ends the process with SIGABRT"),
        ("x = bytearray(1 << 40)", "MemoryError"),
    ],
)
def test_a_model_that_breaks_the_library_breaks_another_process(unigram_model, monkeypatch, fate, reason):
    """A damaged model was read for ever. Which files do that depends on the version of the library."""
    monkeypatch.setattr(sentence_piece, "_TRIAL_SECONDS", 1)
    trial = sentence_piece._TRIAL
    assert trial.count("import sentencepiece\n") == 1
    monkeypatch.setattr(sentence_piece, "_TRIAL", trial.replace("import sentencepiece\n", fate + "\n"))
    with pytest.raises(DataError, match=reason):
        build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=unigram_model))


def test_too_little_memory_is_no_fault_of_the_model(unigram_model, monkeypatch):
    """Under a hard limit the trial could not set its own, and every model was "not one"."""
    below_the_trials = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30));"
        "from pathlib import Path; from megazero.data.tokenizers.sentence_piece import load_model;"
        "print(load_model(Path(sys.argv[1]))[1].get_piece_size())"
    )
    done = subprocess.run(
        [sys.executable, "-c", below_the_trials, unigram_model], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == (
        str(sentence_piece.load_model(Path(unigram_model))[1].get_piece_size()),
        "",
    )
    trial = sentence_piece._TRIAL.replace("import sentencepiece\n", "x = bytearray(1 << 40)\n")
    monkeypatch.setattr(sentence_piece, "_TRIAL", trial)
    monkeypatch.setattr(sentence_piece, "memory_limit", lambda: 1 << 30)
    reason = r"by another process first, but .* was not \(MemoryError\), where a process may have 1,024 MiB"
    with pytest.raises(DataError, match=reason):
        build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=unigram_model))
