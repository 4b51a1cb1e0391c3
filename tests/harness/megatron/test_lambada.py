"""Texts of LAMBADA: their windows by hand, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from megazero.errors import DataError
from megazero.harness.megatron.lambada import fitted, harness_window, last_word, read_texts, report
from megazero.harness.megatron.windows import Window
from tests.tables import over_table


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
    assert last_word(text, encode) == Window(encode(context + label), len(label))


@over_table(
    ("text", "label"), [("to be or not", " not"), ("to be  or", "  or"), ("to be ", " "), ("a b\n", " b\n")]
)
def test_the_harness_encodes_it_with_what_is_before(text, label):
    """Blanks at the end of the context belong to the continuation."""
    assert harness_window(text, encode) == Window(encode(text), len(label))


def test_a_long_text_loses_its_beginning():
    assert fitted(Window(range(9), 2), 8, "f") == Window(range(9), 2)
    assert fitted(Window(range(10), 2), 8, "f") == Window(range(1, 10), 2)


@over_table(("tokens", "counted"), [(1, 1), (3, 3), (20, 9), (3, 0)])
def test_what_cannot_be_scored(tokens, counted):
    with pytest.raises(DataError, match=f"one in f has {tokens} tokens, of which {counted} count"):
        fitted(Window(range(tokens), counted), 8, "f")


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


def test_figures_by_hand():
    """Two of three texts are right; the harness's perplexity is e to the mean of summed losses."""
    asked = []

    def scores(windows):
        asked.append([window.counted for window in windows])
        return np.array([[1.0, 0], [2.0, 3], [6.0, 0]])

    lines = ['{"text": "to be"}', '{"text": "or not to"}', '{"text": "be that is the question"}']
    shown = report(lines, "f", encode, 16, scores, strict=True)
    assert asked == [[3, 3, 9], [3, 3, 9]]
    assert shown == [
        "number correct: 2.0000E+00 | total examples: 3.0000E+00 | avg accuracy: 6.6667E-01",
        "scored 15 tokens of 3 texts, each once; the beginning of 1 was cut, to 17 tokens",
        "by lm-evaluation-harness: acc: 0.666667, perplexity: 20.0855",
    ]
    assert report(lines, "f", encode, 99, scores, strict=False)[1] == "scored 3 tokens of 3 texts, each once"
