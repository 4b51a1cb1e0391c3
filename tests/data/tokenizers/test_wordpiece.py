from __future__ import annotations

from pathlib import Path

import pytest

from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError


def test_ids_follow_the_longest_match_rule(wordpiece_file):
    tokenizer = build_tokenizer(TokenizerSpec("BertWordPieceLowerCase", wordpiece_file))
    assert tokenizer.encode("The CAT sat unable") == [5, 6, 7, 8, 9]
    assert tokenizer.encode("dog") == [1]
    assert tokenizer.decode([5, 6, 8, 9]) == "the cat unable"


def test_case_is_kept_by_the_cased_kind(wordpiece_file):
    tokenizer = build_tokenizer(TokenizerSpec("BertWordPieceCase", wordpiece_file))
    assert tokenizer.encode("the The") == [5, 1]


def test_special_tokens_written_in_a_document_are_plain_text(wordpiece_file):
    tokenizer = build_tokenizer(TokenizerSpec("BertWordPieceLowerCase", wordpiece_file))
    assert tokenizer.encode("[MASK]") == [10, 12, 11]


def test_ids_after_the_vocabulary_are_megatrons(wordpiece_file):
    tokenizer = build_tokenizer(TokenizerSpec("BertWordPieceCase", wordpiece_file, extra_ids=2))
    assert tokenizer.special_ids == {
        "cls": 2, "sep": 3, "pad": 0, "mask": 4, "unk": 1, "bos": 13, "eos": 14,
    }  # fmt: skip
    assert (tokenizer.vocab_size, tokenizer.eod) == (17, None)
    assert tokenizer.extra_ids == (15, 16)
    assert tokenizer.decode([5, 13, 6, 16]) == "the [BOS] cat <extra_id_1>"
    earlier = TokenizerSpec("BertWordPieceCase", wordpiece_file, extra_ids=2, wordpiece_first="eos")
    assert build_tokenizer(earlier).special_ids == {**tokenizer.special_ids, "eos": 13, "bos": 14}
    assert build_tokenizer(earlier).extra_ids == (15, 16)


def test_words_of_200_letters_are_tried_and_longer_ones_unknown(wordpiece_file, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text(Path(wordpiece_file).read_text() + "x\n##x\n")
    tokenizer = build_tokenizer(TokenizerSpec("BertWordPieceCase", str(vocab)))
    assert tokenizer.encode("x" * 200) == [13] + [14] * 199
    assert tokenizer.encode("x" * 201) == [1]


def test_unfit_vocabularies_are_refused(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    with pytest.raises(DataError, match=r"must contain \[MASK\]"):
        build_tokenizer(TokenizerSpec("BertWordPieceCase", str(path)))
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nthe\n")
    with pytest.raises(DataError, match="repeats 'the'"):
        build_tokenizer(TokenizerSpec("BertWordPieceCase", str(path)))


def test_the_pieces_are_those_of_the_file_and_the_appended_ones(wordpiece_file):
    tokenizer = build_tokenizer(TokenizerSpec("BertWordPieceCase", wordpiece_file, extra_ids=1))
    pieces = [*Path(wordpiece_file).read_text().split(), "[BOS]", "[EOS]", "<extra_id_0>"]
    assert tokenizer.word_pieces() == {piece: i for i, piece in enumerate(pieces)}


def test_other_kinds_have_no_word_pieces():
    assert build_tokenizer(TokenizerSpec("ByteLevelTokenizer")).word_pieces() is None


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_batches_give_the_ids_of_single_texts_around_every_character(wordpiece_file, kind):
    """A batch is encoded word by word; characters that BERT removes join what Python takes for words."""
    tokenizer = build_tokenizer(TokenizerSpec(kind, wordpiece_file))
    odd = (0, 0x7F, 0x200B, 0xFEFF, 0xFFFD)
    spaces = [chr(c) for c in range(0x11000) if chr(c).isspace() or c in odd]
    codes = (*range(0x21, 0x250), *range(0x300, 0xD800, 37), *range(0x1F300, 0x1F900, 41))
    letters = [chr(code) for code in codes]
    texts = [f"the{c}Cat {c}sat{c} un{c}able the, {c}{c}" for c in spaces + letters]
    texts += ["", " ", "[MASK] ##able", "the " * 50 + "x" * 300, "İstanbul ΑΣ ΑΣ. ǅ ﬁ 한국 中文the"]
    rows = [row.tolist() for row in tokenizer.encode_batch(texts).rows()]
    assert rows == [tokenizer.encode(text) for text in texts]
    assert [row.tolist() for row in tokenizer.encode_batch(texts[::-1]).rows()] == rows[::-1]
