from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.tokenizers.base import TokenBatch
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.data.tokenizers.fast import first_difference, try_fast
from megazero.data.tokenizers.library import LibraryTokenizer
from tests.data.tokenizers.conftest import HARD_TEXTS


@pytest.fixture(scope="module")
def fast(gpt2):
    pytest.importorskip("gigatoken")
    return try_fast(gpt2).encoder


def test_fast_ids_are_the_tokenizers_on_hard_texts(fast, gpt2, from_json):
    assert first_difference(fast, gpt2, HARD_TEXTS) is None
    assert first_difference(try_fast(from_json).encoder, from_json, HARD_TEXTS) is None


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)))))
def test_fast_ids_are_the_tokenizers_on_any_text(fast, gpt2, texts):
    assert first_difference(fast, gpt2, texts) is None


def test_many_texts_give_the_same_ids_as_few(fast, gpt2):
    texts = [f"fox {i}" * (i % 3) for i in range(5000)]
    assert first_difference(fast, gpt2, texts) is None


def test_fast_never_makes_an_end_of_document_out_of_text(fast, gpt2):
    ids = fast.encode_batch(["a<|endoftext|>b"]).ids.tolist()
    assert gpt2.eod not in ids
    assert ids == gpt2.encode("a<|endoftext|>b")


def test_the_description_for_a_fast_encoder_lacks_what_would_change_texts(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({',"model":{': 0, "b": 1}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    backend.post_processor = tokenizers.processors.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.add_tokens([',"model":{"'])
    whole = json.loads(backend.to_str())
    made = LibraryTokenizer("any", backend, 4, {}, None, tmp_path).fast_source()
    kept = [token for token in whole["added_tokens"] if token["content"] == ',"model":{"']
    assert json.loads(made.data) == {**whole, "added_tokens": kept, "post_processor": None}


@pytest.fixture(scope="module")
def sentencepiece_pair(sp_bpe_model):
    pytest.importorskip("gigatoken")
    tokenizer = build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=sp_bpe_model))
    return try_fast(tokenizer).encoder, tokenizer


TEXTS = st.text(st.characters(exclude_categories=("Cs",))) | st.sampled_from(["</s>", "a<s>", "the fox"])


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.lists(TEXTS))
def test_fast_sentencepiece_bpe_agrees(sentencepiece_pair, texts):
    texts = [*texts, "the quick  brown fox", "naïve 私は猫です ☃", "the</s>fox<unk><0x0A>", ""]
    assert first_difference(*sentencepiece_pair, texts) is None


def test_model_that_normalizes_otherwise_is_found_by_its_letter(normalizing_model):
    """gigatoken and SentencePiece treat U+0085 differently; a sample of documents would rarely show it."""
    pytest.importorskip("gigatoken")
    tokenizer = build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=normalizing_model))
    encoder, reason = try_fast(tokenizer)
    assert encoder is None
    assert reason.startswith("gigatoken gives other ids than GPTSentencePieceTokenizer on ")


def test_unsupported_model_has_no_fast_encoder_and_says_why(unigram_model):
    pytest.importorskip("gigatoken")
    tokenizer = build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=unigram_model))
    encoder, reason = try_fast(tokenizer)
    assert encoder is None
    assert "unigram" in reason


def test_without_the_library_the_reason_is_that(gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert try_fast(gpt2) == (None, "gigatoken is not installed (pip install gigatoken)")


def test_kind_that_needs_no_fast_form_gives_no_reason():
    assert try_fast(build_tokenizer(TokenizerSpec("ByteLevelTokenizer"))) == (None, None)


def test_first_difference_finds_the_text(gpt2):
    class Liar:
        def encode_batch(self, texts):
            rows = gpt2.encode_batch(texts).rows()
            return TokenBatch.of(
                [np.append(row, 7) if "fox" in text else row for row, text in zip(rows, texts, strict=True)]
            )

    assert first_difference(Liar(), gpt2, ["dog", "cat", "a fox", "fox"]) == 2
    assert first_difference(Liar(), gpt2, ["dog", "cat"]) is None
