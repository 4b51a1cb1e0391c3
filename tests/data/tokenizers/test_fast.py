from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.tokenizers import TokenBatch, TokenizerSpec, build_tokenizer, first_difference, try_fast
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


def test_fast_never_makes_an_end_of_document_out_of_text(fast, gpt2):
    ids = fast.encode_batch(["a<|endoftext|>b"]).ids.tolist()
    assert gpt2.eod not in ids
    assert ids == gpt2.encode("a<|endoftext|>b")


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=("Cs",))) | st.sampled_from(["</s>", "a<s>", "the fox"])
    )
)
def test_fast_sentencepiece_bpe_agrees(sp_bpe_model, texts):
    pytest.importorskip("gigatoken")
    tokenizer = build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=sp_bpe_model))
    texts = [*texts, "the quick  brown fox", "naïve 私は猫です ☃", "the</s>fox<unk><0x0A>", ""]
    assert first_difference(try_fast(tokenizer).encoder, tokenizer, texts) is None


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
