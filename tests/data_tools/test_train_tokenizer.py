from __future__ import annotations

import json

import pytest

from data_tools.train_tokenizer import main, texts
from megazero.data.tokenizers import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from tests.data_tools.conftest import visible, write_jsonl


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
