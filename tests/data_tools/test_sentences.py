from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megazero.data_tools.preprocessing.sentences import LANGUAGES, SentenceRules, SentenceSplitter
from megazero.errors import DataError
from tests.tables import over_table

ROOT = Path(__file__).resolve().parents[2]


def _split(text: str, language: str = "english", keep_newlines: bool = False) -> list[str]:
    return SentenceSplitter(SentenceRules(language, keep_newlines))(text)


@over_table(
    ("language", "sentences"),
    [
        ("english", ["Dr. Smith paid 3.50 at 5 p.m.", "He left."]),
        ("english", ["See Fig. 3 and e.g. this.", "Mr. and Mrs. Jones, Inc. sold it.", "OK?", "Yes!"]),
        ("english", ["He came...", "Then he went.", "The U.S. Army came.", "It is in the U.S.", "He left."]),
        ("english", ['He said "I go. You stay."', "Then he left.", '"Why?" she asked.']),
        ("english", ["J. R. Smith wrote to me@example.com about v1.2.3.", "A heading"]),
        ("german", ["Herr Dr. Müller kam am 3. Oktober um ca. 8 Uhr.", "Er zahlte 3,50 Euro.", "„Ja. Gut.“"]),
        ("german", ["Das ist z. B. gut, d.h. sehr gut.", "Nr. 5 auch."]),
        ("french", ["M. Dupont a payé 3,50 € à 5 h.", "J.-P. Sartre est parti.", "Pourquoi ?", "Fin."]),
        ("spanish", ["El Sr. Pérez pagó 3.50 a las 5 p.m.", "¿Por qué?", "¡No sé!", "Fin."]),
        ("russian", ["Он родился в 1990 г. в Москве.", "А. С. Пушкин был тут.", "Да!"]),
        ("any", ["Vilken dag är det?", "Jag vet 3.5 saker."]),
    ],
)
def test_sentences_of_several_languages(language, sentences):
    assert _split(" ".join(sentences), language) == sentences
    assert _split(" ".join(sentences), LANGUAGES[language] or "any") == sentences


@over_table(
    ("language", "sentences"),
    [
        ("japanese", ["私は猫です。", "あなたは犬です。", "はい！"]),
        ("chinese", ["我是猫。", "你是狗！", "他是谁？"]),
        ("hindi", ["मैं जाता हूँ।", "तुम रहो।", "क्या?"]),
    ],
)
def test_sentences_without_spaces_between(language, sentences):
    assert _split("".join(sentences), language) == sentences


def test_whitespace_between_sentences_is_dropped_or_kept_after_them():
    text = " \nA  line\nand another. Next one!\n\n \r\nA heading\n\nEnd.\n"
    assert _split(text) == ["A  line\nand another.", "Next one!", "A heading", "End."]
    kept = _split(text, keep_newlines=True)
    assert kept == [" \nA  line\nand another. ", "Next one!\n\n \r\n", "A heading\n\n", "End.\n"]
    assert _split("") == _split(" \n\n\t") == _split(" \n\n\t", keep_newlines=True) == []


def _noise(chance: random.Random) -> str:
    plain = "aAB .?!\"'()[]\n\r\t,;:01@-/…"
    wide = "éÀß«»„“”’。！？「」私は।ज؟غդж.\u00a0\u3000\u200b\u0301😀\x85\x0b\x1c\u2028 \n"
    own = chance.choice((plain, wide))
    letters = (own if chance.random() < 0.8 else plain for _ in range(chance.randrange(200)))
    return "".join(map(chance.choice, letters))


def test_nothing_but_whitespace_around_sentences_is_lost():
    """Wide spaces before initials made the library fail, and blank lines past 10,000 characters were lost."""
    chance = random.Random(5)
    texts = [_noise(chance) for _ in range(600)] + ["".join(_noise(chance) + "\n\n" for _ in range(300))]
    splitters = {
        language: [SentenceSplitter(SentenceRules(language, keep)) for keep in (False, True)]
        for language in LANGUAGES
    }
    for text in texts:
        stripped, kept = (splitter(text) for splitter in splitters[chance.choice(list(splitters))])
        assert "".join(kept) == ("" if text.isspace() else text)
        assert stripped == [sentence.strip() for sentence in kept]
        assert all(stripped)


def test_long_paragraphs_are_split_as_short_ones_and_in_linear_time():
    """Through windows, but never in the middle of a sentence; half a minute of work if time were
    quadratic."""
    sentences = [f"It's the dogs' bone no. {i}, worth {i}.50 to Dr. Smith." for i in range(9_000)]
    sentences[100] = "word " * 20_000 + "end."
    start = time.process_time()
    assert _split(" ".join(sentences)) == sentences
    assert time.process_time() - start < 10


def test_unknown_language_and_missing_library_are_named(monkeypatch):
    with pytest.raises(DataError, match="`--lang` must be one of amharic, any, .*, but is klingon"):
        _split("", "klingon")
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(DataError, match="package sentencex, but it is not installed"):
        _split("")


def test_library_that_fails_or_loses_text_is_found_out(monkeypatch):
    splitter = SentenceSplitter(SentenceRules())
    monkeypatch.setattr(splitter, "_segment", lambda code, text: [text[:-1]])
    with pytest.raises(DataError, match="must add up to their text"):
        splitter("One. Two.")

    class PanicException(BaseException):
        pass

    def panics(code, text):
        raise PanicException("not a char boundary")

    monkeypatch.setattr(splitter, "_segment", panics)
    with pytest.raises(DataError, match="it fails: not a char boundary"):
        splitter("One. Two.")


def test_splits_are_the_same_in_every_process():
    code = (
        "from megazero.data_tools.preprocessing.sentences import *\n"
        "text = open('docs/data.md', encoding='utf-8').read()\n"
        "print(SentenceSplitter(SentenceRules('de'))(text) + SentenceSplitter(SentenceRules())(text))"
    )
    run = [sys.executable, "-c", code]
    outputs = {subprocess.run(run, cwd=ROOT, check=True, capture_output=True).stdout for _ in range(2)}
    assert len(outputs) == 1
