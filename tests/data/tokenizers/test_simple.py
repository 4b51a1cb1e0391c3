from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from tests.tables import over_table

BYTES = build_tokenizer(TokenizerSpec("ByteLevelTokenizer"))


def test_bytes_are_their_own_ids():
    assert BYTES.encode("aé\n") == [97, 195, 169, 10]
    assert (BYTES.vocab_size, BYTES.eod) == (257, 256)
    batch = BYTES.encode_batch(["ab", "", "é"])
    assert batch.ids.tolist() == [97, 98, 195, 169]
    assert batch.lengths.tolist() == [2, 0, 2]


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_byte_decode_inverts_encode(text):
    assert BYTES.decode(BYTES.encode(text)) == text


def test_byte_decode_shows_the_end_and_cut_letters():
    assert BYTES.decode([97, 256, 195]) == "a<|endoftext|>\ufffd"
    with pytest.raises(DataError, match="257"):
        BYTES.decode([257])


def test_null_reads_integers_and_ends_with_the_given_size():
    tokenizer = build_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=100))
    assert tokenizer.encode(" 1 99\t0\n") == [1, 99, 0]
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.decode([5, 100]) == "5 100"


@over_table("text", ["1 two", "100", "-1", "1.0", "٣", "9" * 30, "1_0"])
def test_null_refuses_what_is_no_id(text):
    with pytest.raises(DataError, match=r"0\.\.99"):
        build_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=100)).encode(text)


def test_a_number_of_more_than_19_digits_is_no_id():
    """However small: Python takes long to read one of a million digits."""
    tokenizer = build_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=100))
    assert list(tokenizer.encode("0000000000000000005")) == [5]
    with pytest.raises(DataError, match="00000000000000000005"):
        tokenizer.encode("00000000000000000005")
