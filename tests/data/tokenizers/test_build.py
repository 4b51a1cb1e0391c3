from __future__ import annotations

import subprocess
import sys

import pytest

from megazero.data.tokenizers.build import TOKENIZER_KINDS, TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from tests.tables import over_table


@over_table(
    ("spec", "setting"),
    [
        (TokenizerSpec("GPT2BPETokenizer"), "vocab_file"),
        (TokenizerSpec("GPT2BPETokenizer", vocab_file=__file__), "merge_file"),
        (TokenizerSpec("BertWordPieceLowerCase"), "vocab_file"),
        (TokenizerSpec("BertWordPieceCase"), "vocab_file"),
        (TokenizerSpec("HFTokenizer"), "tokenizer_model"),
        (TokenizerSpec("TokenizerJson"), "tokenizer_model"),
        (TokenizerSpec("SentencePieceTokenizer"), "tokenizer_model"),
        (TokenizerSpec("GPTSentencePieceTokenizer"), "tokenizer_model"),
        (TokenizerSpec("NullTokenizer"), "vocab_size"),
    ],
)
def test_missing_file_is_refused_by_naming_its_setting(spec, setting):
    with pytest.raises(DataError, match=setting):
        build_tokenizer(spec)


@over_table("kind", [kind for kind in TOKENIZER_KINDS if kind not in ("ByteLevelTokenizer", "NullTokenizer")])
def test_file_of_another_kind_is_refused_by_naming_it(kind, tmp_path):
    wrong = tmp_path / "wrong.bin"
    wrong.write_bytes(b"\x80\x81 not a tokenizer \xff")
    spec = TokenizerSpec(kind, vocab_file=str(wrong), merge_file=str(wrong), model=str(wrong))
    with pytest.raises(DataError, match=r"wrong\.bin"):
        build_tokenizer(spec)


def test_a_name_on_a_hub_is_told_how_to_fetch_it(tmp_path, monkeypatch):
    def fails(name, allow_patterns):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"correct `tokenizer_model`"):
        build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tmp_path / "tokenizer.json")))
    with pytest.raises(
        DataError, match="gpt2 is not there.*run `hf download openai-community/gpt2 tokenizer.json"
    ):
        build_tokenizer(TokenizerSpec("HFTokenizer", model="openai-community/gpt2"))


def test_unknown_kind_names_the_nearest():
    with pytest.raises(DataError, match="did you mean GPT2BPETokenizer"):
        build_tokenizer(TokenizerSpec("GPT2BPETokeniser"))


def test_values_without_use_are_refused():
    with pytest.raises(DataError, match=r"vocab_size.*257.*but is 300"):
        build_tokenizer(TokenizerSpec("ByteLevelTokenizer", vocab_size=300))
    with pytest.raises(DataError, match=r"vocab_extra_ids.*must be 0"):
        build_tokenizer(TokenizerSpec("ByteLevelTokenizer", extra_ids=3))
    with pytest.raises(DataError, match=r"vocab_extra_ids.*but is -1"):
        build_tokenizer(TokenizerSpec("BertWordPieceCase", extra_ids=-1))


def test_importing_the_package_loads_no_tokenizer_library():
    code = (
        "import sys, megazero.data.tokenizers;"
        "heavy = {'tokenizers', 'sentencepiece', 'gigatoken', 'transformers', 'awkward'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
