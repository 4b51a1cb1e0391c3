from __future__ import annotations

from pathlib import Path

import pytest

from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer

SENTENCE = "the quick brown fox jumps over the lazy dog while naïve Zoë counts 12345 stars and 私は猫です"
WORDS = SENTENCE.split()
LINES = [" ".join(WORDS[i % 17 :] + WORDS[: i % 17]) + f" line {i}.\n" for i in range(400)]
WORDPIECE = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "sat",
    "un",
    "##able",
    "[",
    "]",
    "mask",
]

# Texts that trip tokenizers: blanks, controls, scripts, joined emoji, special tokens as plain letters.
HARD_TEXTS = [
    "",
    " ",
    "\n\n\n  \t x",
    "a<|endoftext|>b",
    "<|endoftext|>",
    "</s><s>[MASK]<unk>",
    "don't DON'T we'll",
    "naïve Zoë 私は猫です 👩‍👩‍👧‍👦 \u200b\u00a0\u2028",
    "\x00\x01\x7f",
    "123456789 1,234.5",
    "x" * 5000,
    "e\u0301 \ufb01 \U0001d400 \ufeff",
]


@pytest.fixture(scope="session")
def bpe_dir(tmp_path_factory) -> Path:
    """vocab.json, merges.txt and tokenizer.json of a 350-token byte-level BPE with <|endoftext|>."""
    import json

    from megazero.data_tools.train_tokenizer import main

    folder = tmp_path_factory.mktemp("bpe")
    rows = [json.dumps({"text": line}) + "\n" for line in LINES]
    (folder / "c.jsonl").write_text("".join(rows))
    assert main(["--input", str(folder / "c.jsonl"), "--output", str(folder), "--vocab-size", "350"]) == 0
    return folder


def _train_sentencepiece(folder: Path, **settings) -> str:
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("".join(LINES), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "m"), minloglevel=2, num_threads=1, **settings
    )
    return str(folder / "m.model")


@pytest.fixture(scope="session")
def unigram_model(tmp_path_factory) -> str:
    """A SentencePiece unigram model of 120 pieces (no pad)."""
    return _train_sentencepiece(tmp_path_factory.mktemp("unigram"), vocab_size=120, hard_vocab_limit=False)


@pytest.fixture(scope="session")
def sp_bpe_model(tmp_path_factory) -> str:
    """A SentencePiece BPE model with byte fallback, as Llama's."""
    folder = tmp_path_factory.mktemp("spbpe")
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return _train_sentencepiece(folder, vocab_size=400, model_type="bpe", byte_fallback=True, **plain)


@pytest.fixture(scope="session")
def normalizing_model(tmp_path_factory) -> str:
    """A SentencePiece BPE model that also normalizes (NFKC and more)."""
    folder = tmp_path_factory.mktemp("spnorm")
    return _train_sentencepiece(folder, vocab_size=400, model_type="bpe", byte_fallback=True)


@pytest.fixture(scope="session")
def wordpiece_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("wp") / "vocab.txt"
    path.write_text("\n".join(WORDPIECE) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def gpt2(bpe_dir):
    return build_tokenizer(
        TokenizerSpec("GPT2BPETokenizer", str(bpe_dir / "vocab.json"), str(bpe_dir / "merges.txt"))
    )


@pytest.fixture(scope="session")
def from_json(bpe_dir):
    return build_tokenizer(TokenizerSpec("HFTokenizer", model=str(bpe_dir)))
