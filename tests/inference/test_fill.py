"""What a model expects at masked places: alone or beside longer texts, whole or spread over ranks."""

from __future__ import annotations

import pytest
import torch

from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import ConfigError, DataError
from megazero.inference.fill import MaskFiller
from tests.inference.masked import MODEL, WORDS, on_ranks, word_pieces
from tests.layouts.layout import Layout

TEXTS = [
    "The capital of [MASK] is Paris.",
    "[MASK]",
    "It is in [MASK], the capital[SEP]of [MASK] [MASK]s a",
    "the [MASK] , , , is a",
]


@pytest.fixture
def tokenizer(tmp_path):
    return word_pieces(tmp_path)


def test_the_token_that_the_head_prefers_comes_first(tokenizer):
    def work(filler):
        head = filler.model.chunks[0].head
        with torch.no_grad():
            head.bias[WORDS.index("paris")] = 40.0
            head.bias[WORDS.index("##s")] = 30.0
            head.bias[len(WORDS) + 2 :] = 90.0  # rows that pad the vocabulary
        return filler.fill(TEXTS, top_k=2)

    (found,) = on_ranks(Layout(), tokenizer, work)
    assert [len(masks) for masks in found] == [1, 1, 3, 1]
    for masks in found:
        for best, second in masks:
            assert (best.token, second.token) == ("paris", "##s")
            assert best.probability > 0.99 > 1e-2 > second.probability > 0.0


def test_probabilities_are_those_of_the_whole_vocabulary(tokenizer):
    (found,) = on_ranks(Layout(), tokenizer, lambda filler: filler.fill(TEXTS, top_k=99))
    for masks in found:
        for candidates in masks:
            assert sorted(each.token for each in candidates) == sorted([*WORDS, "[EOS]", "[BOS]"])
            values = [each.probability for each in candidates]
            assert values == sorted(values, reverse=True)
            assert sum(values) == pytest.approx(1.0, abs=1e-6)
            assert values[0] > 3 * values[9]


def test_other_texts_in_the_batch_change_nothing(tokenizer):
    def work(filler):
        together = filler.fill(TEXTS, top_k=4)
        return together, [filler.fill([text], top_k=4)[0] for text in TEXTS], filler.fill(TEXTS, batch_size=3)

    ((together, alone, threes),) = on_ranks(Layout(), tokenizer, work)
    for one, other, third in zip(together, alone, threes, strict=True):
        for a, b, c in zip(one, other, third, strict=True):
            assert [each.token for each in a] == [each.token for each in b] == [each.token for each in c][:4]
            assert [e.probability for e in a] == pytest.approx([e.probability for e in b], abs=1e-6)
    assert together[0] != together[3]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(pp=2),
        Layout(tp=2, pp=2, schedule="zb-v"),
        Layout(pp=2, schedule="interleaved", virtual=2),
    ],
    ids=lambda layout: layout.name,
)
def test_every_rank_of_a_layout_finds_the_same(layout, tokenizer):
    (serial,) = on_ranks(Layout(), tokenizer, lambda filler: filler.fill(TEXTS))
    for found in on_ranks(layout, tokenizer, lambda filler: filler.fill(TEXTS)):
        for one, other in zip(serial, found, strict=True):
            for a, b in zip(one, other, strict=True):
                assert [each.token for each in a] == [each.token for each in b]
                assert [e.probability for e in a] == pytest.approx([e.probability for e in b], abs=1e-6)


def test_segments_and_masks_become_ids(tokenizer):
    def work(filler):
        return [filler.encode(number, text) for number, text in enumerate(TEXTS, 1)]

    (rows,) = on_ranks(Layout(), tokenizer, work)
    assert rows[1].tokens == [2, 4, 3]
    # "s" is no word of its own; the ##s of the vocabulary continues one.
    assert rows[2].tokens == [2, 17, 8, 16, 4, 13, 5, 6, 3, 7, 4, 4, 1, 15, 3]
    assert rows[2].types == [0] * 9 + [1] * 6


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["[MASK]", "the mask"], r"`text` must contain \[MASK\], but text 2 is 'the mask'; write \[MASK\]"),
        (["a[SEP][MASK][SEP]b"], r"at most one \[SEP\] between two segments, but text 1 has 2"),
        (["a " * 14 + "[MASK]"], "at most 16 tokens, the model's positions, but text 1 has 17"),
    ],
)
def test_what_cannot_be_filled_is_refused(texts, message, tokenizer):
    with pytest.raises(DataError, match=message):
        on_ranks(Layout(), tokenizer, lambda filler: filler.fill(texts))


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"batch_size": 0}])
def test_settings_without_sense_are_refused(settings, tokenizer):
    with pytest.raises(ConfigError, match="must be at least 1, but is 0"):
        on_ranks(Layout(), tokenizer, lambda filler: filler.fill(TEXTS, **settings))


def test_a_longest_text_fits(tokenizer):
    (found,) = on_ranks(Layout(), tokenizer, lambda filler: filler.fill(["a " * 13 + "[MASK]"]))
    assert len(found[0][0]) == 5


def test_without_the_binary_head_there_are_no_types(tokenizer):
    model = MODEL.model_copy(update={"bert_binary_head": False})
    (found,) = on_ranks(Layout(), tokenizer, lambda filler: filler.fill(TEXTS), model)
    assert [len(masks) for masks in found] == [1, 1, 3, 1]


def test_a_tokenizer_without_special_tokens_is_refused():
    tokenizer = build_tokenizer(TokenizerSpec("ByteLevelTokenizer"))
    with pytest.raises(DataError, match=r"but lacks \[CLS\], \[SEP\], \[MASK\], \[PAD\];"):
        MaskFiller(None, tokenizer, None)
