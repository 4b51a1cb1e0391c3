from __future__ import annotations

import pytest

from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from tests.data.tokenizers.conftest import HARD_TEXTS


def test_gpt_kind_is_the_model_itself(unigram_model):
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=unigram_model)
    tokenizer = build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=unigram_model))
    assert tokenizer.vocab_size == model.get_piece_size()
    assert tokenizer.special_ids == {"unk": 0, "bos": 1, "eos": 2}
    assert tokenizer.eod == 2
    assert tokenizer.encode("the quick fox") == model.encode("the quick fox")
    assert tokenizer.decode(tokenizer.encode("the quick fox")) == "the quick fox"
    rows = tokenizer.encode_batch(HARD_TEXTS).rows()
    assert [row.tolist() for row in rows] == [model.encode(text) for text in HARD_TEXTS]


def test_llama_2_puts_bos_before_every_text(unigram_model):
    """Megatron-LM's preprocessing does so too; a document still ends with eos."""
    plain = build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=unigram_model))
    llama = build_tokenizer(TokenizerSpec("Llama2Tokenizer", model=unigram_model))
    assert (llama.vocab_size, llama.eod, llama.special_ids) == (plain.vocab_size, 2, plain.special_ids)
    assert llama.encode("the quick fox") == [1, *plain.encode("the quick fox")]
    assert llama.encode("") == [1]
    assert llama.decode(llama.encode("the quick fox")) == "the quick fox"
    rows = llama.encode_batch(HARD_TEXTS).rows()
    assert [row.tolist() for row in rows] == [llama.encode(text) for text in HARD_TEXTS]
    assert llama.fast_source() is None  # the fast encoder knows no bos


def test_llama_2_needs_a_bos(tmp_path):
    import sentencepiece

    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=30,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(DataError, match="with a bos for Llama2Tokenizer, but .* has none"):
        build_tokenizer(TokenizerSpec("Llama2Tokenizer", model=str(tmp_path / "m.model")))


def test_control_tokens_written_in_a_document_are_plain_text(unigram_model, sp_bpe_model):
    for model in (unigram_model, sp_bpe_model):
        tokenizer = build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=model))
        assert not {1, 2} & set(tokenizer.encode("the</s> <s>fox"))


def test_megatrons_special_tokens_follow_the_pieces_in_order(unigram_model):
    tokenizer = build_tokenizer(TokenizerSpec("SentencePieceTokenizer", model=unigram_model, extra_ids=2))
    pieces = build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=unigram_model)).vocab_size
    # <CLS> <SEP> <EOD> <MASK> <PAD> are new; <s> and </s> are the model's own; then two extra ids.
    assert tokenizer.special_ids == {
        "unk": 0, "bos": 1, "eos": 2, "cls": pieces, "sep": pieces + 1, "mask": pieces + 3, "pad": pieces + 4,
    }  # fmt: skip
    assert tokenizer.eod == pieces + 2
    assert tokenizer.vocab_size == pieces + 7
    assert tokenizer.extra_ids == (pieces + 5, pieces + 6)
    ids = [*tokenizer.encode("the fox"), tokenizer.eod, *tokenizer.encode("stars"), pieces + 6]
    assert tokenizer.decode(ids) == "the fox<EOD>stars<extra_id_1>"
