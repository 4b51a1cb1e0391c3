from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megazero.data import build_report
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.data_tools import train_tokenizer
from megazero.data_tools.train_tokenizer import TrainingProgress, main, texts
from megazero.errors import DataError
from tests.data_tools.conftest import visible, write_jsonl

ROOT = Path(__file__).resolve().parents[2]


def _corpus(path, count=60):
    return write_jsonl(path, [{"text": f"alpha beta gamma {i} delta épsilon " * 4} for i in range(count)])


def test_three_files_give_one_tokenizer_and_come_out_the_same_twice(tmp_path, capsys):
    corpus = _corpus(tmp_path / "c.jsonl")
    for name in ("one", "two"):
        assert main(["--input", corpus, "--output", str(tmp_path / name), "--vocab-size", "290"]) == 0
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    folder = tmp_path / "one"
    gpt2 = TokenizerSpec(
        "GPT2BPETokenizer", str(folder / "vocab.json"), str(folder / "merges.txt"), vocab_size=290
    )
    from_json = TokenizerSpec("HFTokenizer", model=str(folder), vocab_size=290)
    a, b = build_tokenizer(gpt2), build_tokenizer(from_json)
    assert a.eod == b.eod == 0
    text = "alpha épsilon beta ☃ 17"
    assert a.encode(text) == b.encode(text)
    assert len(a.encode("alpha beta")) < 10
    assert json.loads((folder / "vocab.json").read_text(encoding="utf-8"))["<|endoftext|>"] == 0


def test_sample_takes_the_first_lines_only(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "0123456789"}] * 3 + [b"{ never read"])
    line = len(b'{"text": "0123456789"}\n')
    assert list(texts([path], "text", 2 * line)) == ["0123456789"] * 2
    assert list(texts([path], "text", 2 * line + 1)) == ["0123456789"] * 3
    with pytest.raises(DataError, match="line 4: malformed JSON"):
        list(texts([path], "text", None))


def test_failures_write_nothing(tmp_path, out, capsys):
    corpus = _corpus(tmp_path / "c.jsonl", count=2)
    for flags, words in (
        (["--vocab-size", "100"], "must be at least 257"),
        (["--vocab-size", "9000"], "this text yields"),
        (["--json-key", "body"], "missing key"),
    ):
        assert main(["--input", corpus, "--output", str(out), *flags]) == 1
        assert words in capsys.readouterr().err
    assert visible(out) == []


_WORDS = ["The Queen's café walks", "walking walked a naïve walker", "Über 3.50 talks, talking (talked)"]


@pytest.mark.parametrize("cased", [False, True])
def test_wordpiece_files_agree_and_load_as_the_kind_that_is_named(tmp_path, capsys, cased):
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": text} for text in _WORDS * 20])
    flags = ["--type", "wordpiece", "--vocab-size", "74", *["--cased"] * cased]
    assert main(["--input", corpus, "--output", str(tmp_path / "wp"), *flags]) == 0
    kind = "BertWordPieceCase" if cased else "BertWordPieceLowerCase"
    assert f"--tokenizer-type {kind} --vocab-file" in capsys.readouterr().out
    vocab = (tmp_path / "wp" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert vocab[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(vocab) == len(set(vocab)) == 74
    from_vocab = build_tokenizer(TokenizerSpec(kind, str(tmp_path / "wp" / "vocab.txt")))
    from_json = build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tmp_path / "wp")))
    text = "The naïve Queen walked, café 3.50!"
    assert from_vocab.encode(text) == from_json.encode(text)
    words = from_vocab.decode(from_vocab.encode("The café walked"))
    assert words == ("The café walked" if cased else "the cafe walked")
    assert ("Q" in vocab) == cased


def test_wordpiece_is_the_same_in_every_process(tmp_path):
    """The library's trainer numbers letters by a hash map: left to itself it gave three vocabularies in three
    runs."""
    letters = "abcdefg"
    texts = [
        " ".join(letters[i % 7] + letters[i * j % 7] + letters[j % 5] for j in range(1, 30))
        for i in range(40)
    ]
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    flags = ["--input", corpus, "--type", "wordpiece", "--vocab-size", "80", "--output"]
    assert main([*flags, str(tmp_path / "one")]) == 0
    command = [sys.executable, str(ROOT / "data_tools" / "train_tokenizer.py"), *flags, str(tmp_path / "two")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for name in ("vocab.txt", "tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_unfit_wordpiece_flags_write_nothing(tmp_path, out, capsys):
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": "some words"}])
    for flags, words in (
        (["--type", "wordpiece", "--vocab-size", "12"], "must be at least 18, for the letters of this text"),
        (["--type", "wordpiece", "--vocab-size", "9000"], "this text yields"),
        (["--cased"], "`--cased` must come with `--type wordpiece`"),
    ):
        assert main(["--input", corpus, "--output", str(out), *flags]) == 1
        assert words in capsys.readouterr().err
    assert visible(out) == []


def test_a_long_training_says_how_far_it_is(monkeypatch, capsys):
    """It was silent for minutes."""
    monkeypatch.setattr(build_report, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(train_tokenizer, "_INTERVAL", 0.001)
    progress = TrainingProgress()
    with progress.shown():
        assert list(progress.counted(iter(["abc", "d"]))) == ["abc", "d"]
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "training: 0.0 million characters read, merging, after 0 s"
    assert len(lines) < 20
