"""The rules that join words: each by a literal example, and all of them as lm-evaluation-harness has them."""

from __future__ import annotations

import importlib.util
import random
import runpy

import pytest

from megazero.errors import DataError
from megazero.harness.megatron.detokenize import detokenize
from tests.tables import over_table


@over_table(
    ("path", "text", "running"),
    [
        ("wiki.txt", "the boys ' ball", "the boys' ball"),
        ("wiki.txt", "a / ' 9/ b", "a / ' 9/ b"),
        ("wiki.txt", "up @-@ to 1 @,@ 000 @.@ 5", "up-to 1,000.5"),
        ("wiki.txt", "a : b ; c . d ! e ? f , g", "a: b; c. d! e? f, g"),
        ("wiki.txt", "a ( b c ) [ d ] { e }", "a (b c) [d] {e}"),
        ("wiki.txt", 'he said " no " , she', 'he said "no", she'),
        ("wiki.txt", "a ' b c ' d", "a 'b c' d"),
        ("wiki.txt", "( a ( b ) c )", "(a ( b) c )"),  # the shortest pair
        ("wiki.txt", " = = = = A = = = = \n", " ==== A ====\n"),
        ("wiki.txt", "= = A = = B = = = C", "== A == B === C"),
        ("wiki.txt", "30 ° N of", "30°N of"),
        ("wiki.txt", "a \n b \n\n c", "a\nb\n\nc"),
        ("wiki.txt", "a N b", "a 1 b"),
        ("wiki.txt", "it 's", "it's"),
        ("ptb.txt", "it 's do n't \n N years $ N # N", "it's don't\nN years $1 # N"),
        ("ptb.txt", "a N b $ 1 # 1", "a1 b $1 #1"),
        ("lambada.txt", "as , it 's", "as , it 's"),
        ("ptb/wiki", "a , b", "a , b"),  # the first name counts, wherever it stands in the path
        ("wiki/lambada", "a , b", "a, b"),
    ],
)
def test_by_hand(path, text, running):
    assert detokenize(text, path) == running


def test_it_is_what_the_harness_does():
    package = importlib.util.find_spec("lm_eval")
    if package is None:
        pytest.skip("needs lm_eval")
    # By its file, because the package of all its tasks takes seconds to import.
    (folder,) = package.submodule_search_locations
    theirs = runpy.run_path(f"{folder}/tasks/wikitext/preprocess_wikitext.py")["wikitext_detokenizer"]
    pieces = ["a", "Nine", " ", "  ", "\n", " N ", "s '", " 's", "' 9", "=", " = = ", " ° ", *"()[]{}\"'"]
    pieces += [f" {mark} " for mark in (*":;.!?,", "@-@", "@,@", "@.@")]
    draw = random.Random(3)
    for _ in range(2000):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 40)))
        assert detokenize(text, "wiki") == theirs({"page": text})


def test_a_path_without_a_known_name():
    with pytest.raises(DataError, match=r"must have ptb, wiki, lambada in its path, .* but is data/a\.txt"):
        detokenize("a", "data/a.txt")
