"""Texts of LAMBADA: their windows by hand, and what is refused."""

from __future__ import annotations

import pytest

from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from megazero.harness.megatron.lambada import harness_split, last_token, last_word, read_texts, report
from megazero.harness.scoring import Score
from tests.tables import over_table

BYTES = build_tokenizer(TokenizerSpec("ByteLevelTokenizer"))


def encode(text: str) -> list[int]:
    return list(text.encode())


@over_table(
    ("text", "context", "label"),
    [
        ("to be or not", "to be or", " not"),
        ("to be  or \n not \n", "to be  or", " not"),
        ("a ab b", "a ab", " b"),  # the last place where it stands, be it the end of another word
        ("to be .", "to be", " ."),
    ],
)
def test_the_last_word_is_encoded_apart(text, context, label):
    assert last_word(text, encode) == (encode(context), encode(label))


def test_the_last_token_alone():
    assert last_token("ab c", encode) == (encode("ab "), encode("c"))


@over_table(
    ("text", "context", "label"),
    [
        ("to be or not", "to be or", " not"),
        ("to be  or", "to be", "  or"),
        ("to be ", "to be", " "),
        ("a b\n", "a", " b\n"),
    ],
)
def test_the_harness_encodes_it_with_what_is_before(text, context, label):
    """Blanks at the end of the context belong to the continuation."""
    assert harness_split(text, encode) == (encode(context), encode(label))


@over_table(
    ("lines", "words"),
    [
        (["{"], "line 1 is none"),
        (['{"text": "a b"}', "", '{"txt": "a b"}'], "in line 3 is None"),
        (['{"text": 5}'], "in line 1 is 5"),
        (['["a b"]'], "in line 1 is None"),
        (['{"text": " word \\n"}'], "in line 1 is ' word "),
        (["", " "], "f is empty"),
        (["[" * 100_000], "line 1 is none"),
    ],
)
def test_bad_lines(lines, words):
    with pytest.raises(DataError) as raised:
        read_texts(lines, "f")
    assert words in str(raised.value)


class Scores:
    """Finds the first and the last text right."""

    max_length = 16

    def __init__(self):
        self.asked: list[list[str]] = []

    def score(self, pairs):
        self.asked.append([bytes(counted).decode() for _, counted in pairs])
        return [Score(-1.0, True), Score(-2.0, False), Score(-6.0, True)]


def test_figures_by_hand():
    """Two of three texts are right; the harness's perplexity is e to the mean of summed losses."""
    scorer, lines = (
        Scores(),
        ['{"text": "to be"}', '{"text": "or not to"}', '{"text": "be that is the question"}'],
    )
    shown = report(lines, "f", BYTES, scorer, strict=True)
    assert scorer.asked == [[" be", " to", " question"]] * 2
    assert shown == [
        "number correct: 2.0000E+00 | total examples: 3.0000E+00 | avg accuracy: 6.6667E-01",
        "scored 15 tokens of 3 texts, each once; the beginning of 1 was cut, to 17 tokens",
        "by lm-evaluation-harness: acc: 0.666667, perplexity: 20.0855",
    ]
    shown = report(lines, "f", BYTES, scorer, strict=False)
    assert scorer.asked[2] == ["e", "o", "n"]
    assert shown[1] == "scored 3 tokens of 3 texts, each once; the beginning of 1 was cut, to 17 tokens"
