from __future__ import annotations

from dataclasses import replace

import numpy as np

from megazero.data.bert.masking import mask_tokens, run_chances, words_of
from tests.data.bert.golden import SIZE, WORDS
from tests.tables import over_table

CLS, SEP, MASK = WORDS.cls, WORDS.sep, WORDS.mask


def test_pieces_join_the_word_before_them():
    # 8 and 11 continue a word; a special token in the text other than [CLS] and [SEP] is a word.
    assert words_of([CLS, 6, 8, 11, 7, SEP, 9, 8, MASK, SEP], WORDS) == [[1, 2, 3], [4], [6, 7], [8]]


def test_a_piece_without_a_word_before_it_opens_one():
    assert words_of([CLS, 8, 11, 6, SEP], WORDS) == [[1, 2], [3]]


def test_a_piece_at_the_head_of_segment_b_joins_the_word_before_the_separator():
    assert words_of([CLS, 6, SEP, 8, 7, SEP], WORDS) == [[1, 3], [4]]


def test_nothing_but_special_tokens_is_no_word():
    assert words_of([CLS, SEP], WORDS) == []
    assert mask_tokens([CLS, SEP], 10, 0.15, WORDS, np.random.RandomState(1)) == ([CLS, SEP], [])


def test_runs_are_as_likely_as_they_are_short():
    np.testing.assert_allclose(run_chances(), [6 / 11, 3 / 11, 2 / 11], rtol=1e-15)


@over_table(
    ("length", "target", "prob", "count"),
    [
        (100, 97, 0.15, 14),  # 14.55 is less than 15
        (100, 125, 0.15, 15),
        (10, 125, 0.25, 2),  # 2.5 is rounded to the even number
        (14, 125, 0.25, 4),  # and 3.5 too
        (5, 125, 0.01, 1),  # at least one
        (16, 13, 0.15, 1),  # 1.95
        (5, 2, 0.15, 0),  # 0.3: the target was too short for any
    ],
)
def test_the_budget(length, target, prob, count):
    words = [6] * (length - 2)  # of one piece each, so that all of the budget can be used
    for seed in range(20):
        tokens = [CLS, *words, SEP]
        _, places = mask_tokens(tokens, target, prob, WORDS, np.random.RandomState(seed))
        assert len(places) == count


def test_words_are_masked_whole_and_the_rest_stays():
    rng = np.random.default_rng(7)
    for seed in range(100):
        tokens = [CLS, *rng.integers(5, SIZE, 30).tolist(), SEP, *rng.integers(5, SIZE, 30).tolist(), SEP]
        masked, places = mask_tokens(tokens, 60, 0.3, WORDS, np.random.RandomState(seed))
        assert places == sorted(set(places))
        assert 0 < len(places) <= 0.3 * 60
        for word in words_of(tokens, WORDS):
            assert len(set(word) & set(places)) in (0, len(word))
        assert [t for i, t in enumerate(masked) if i not in places] == [
            t for i, t in enumerate(tokens) if i not in places
        ]


def test_eight_in_ten_become_mask_one_another_and_one_stays():
    masks = kept = others = 0
    tokens = [CLS, *[6] * 98, SEP]
    for seed in range(300):
        masked, places = mask_tokens(tokens, 98, 0.5, WORDS, np.random.RandomState(seed))
        new = [masked[place] for place in places]
        masks, kept = masks + new.count(MASK), kept + new.count(6)
        others += len(new) - new.count(MASK) - new.count(6)
    total = masks + kept + others
    assert total == 300 * 49
    # A random id may be [MASK] or the same again.
    assert abs(masks / total - (0.8 + 0.1 / SIZE)) < 0.01
    assert abs(kept / total - (0.1 + 0.1 / SIZE)) < 0.008
    assert abs(others / total - 0.1 * (SIZE - 2) / SIZE) < 0.008


def test_replacements_are_of_the_ids_that_there_are():
    words = replace(WORDS, replacements=np.array([17, 19]))
    tokens = [CLS, *[6] * 100, SEP]
    seen = set()
    for seed in range(40):
        seen |= set(mask_tokens(tokens, 100, 0.5, words, np.random.RandomState(seed))[0])
    assert seen == {CLS, SEP, MASK, 6, 17, 19}
