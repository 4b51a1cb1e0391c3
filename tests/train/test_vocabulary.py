"""How many rows the embedding has."""

from __future__ import annotations

import pytest

from megazero.errors import ConfigError
from megazero.train.parts.vocabulary import build_vocabulary
from tests.config.samples import make_config
from tests.tables import over_table

BYTES = 257  # entries of the byte-level tokenizer, the end of a document among them


@over_table(
    ("size", "divisor", "tp", "expected"),
    [
        (None, 100, 1, (BYTES, 300)),
        (None, 100, 4, (BYTES, 400)),
        (1000, 100, 1, (1000, 1000)),
        (1000, 100, 4, (1000, 1200)),
        (1001, 1, 2, (1001, 1002)),
    ],
)
def test_it_is_padded_to_a_multiple_for_each_tensor_parallel_rank(size, divisor, tp, expected):
    config = make_config(
        {
            "model.vocab_size": size,
            "model.make_vocab_size_divisible_by": divisor,
            "parallel.tensor_model_parallel_size": tp,
        }
    )
    vocabulary = build_vocabulary(config)
    assert (vocabulary.size, vocabulary.padded) == expected
    assert vocabulary.eod == BYTES - 1


def test_without_a_tokenizer_the_size_must_be_given_and_no_document_ends():
    bare = {"tokenizer.tokenizer_type": None}
    vocabulary = build_vocabulary(make_config({**bare, "model.vocab_size": 50}))
    assert (vocabulary.size, vocabulary.padded, vocabulary.eod, vocabulary.tokenizer) == (50, 128, None, None)
    with pytest.raises(ConfigError, match="`vocab_size` must be known"):
        build_vocabulary(make_config(bare))


def test_a_vocabulary_smaller_than_the_tokenizer_s_is_refused():
    with pytest.raises(ConfigError, match="must be at least the tokenizer's 257, but is 256"):
        build_vocabulary(make_config({"model.vocab_size": 256}))


def test_further_entries_and_rows_that_are_asked_for():
    more = {"model.vocab_size": 1000, "model.extra_vocab_size": 7}
    vocabulary = build_vocabulary(make_config({**more, "model.pad_vocab_size_to": 1010}))
    assert (vocabulary.size, vocabulary.padded) == (1007, 1010)
    with pytest.raises(
        ConfigError, match=r"must be at least the size of the vocabulary \(1007\), but is 1006"
    ):
        build_vocabulary(make_config({**more, "model.pad_vocab_size_to": 1006}))
