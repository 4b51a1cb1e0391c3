"""Texts from streams of tokens: nothing is lost, nothing comes twice, and a stop string is never shown."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.data.tokenizers.library import load_tokenizer_json
from megazero.data.tokenizers.simple import ByteLevelTokenizer, NullTokenizer
from megazero.serving.text import ChoiceText, Decoder, Piece, StopRule, TokenTexts
from megazero.serving.wanted import Token
from tests.data.conversations.tokenizer import byte_level, word_marks, write_folder
from tests.data.tokenizers.conftest import _train_sentencepiece
from tests.tables import over_table

LOST = "\N{REPLACEMENT CHARACTER}"
BYTES = TokenTexts(ByteLevelTokenizer())
HARD = (
    "naïve Zoë, 私は猫です 안녕하세요 세계",
    "emoji 👩‍👩‍👧‍👦 and 🙂🙂 at the end 🙂",
    " leading and  two blanks\n\n\ttab",
    "你好" * 40,
    "",
)


class Spy(ByteLevelTokenizer):
    """Counts the tokens that are decoded."""

    decoded = 0

    def decode(self, ids):
        self.decoded += len(ids)
        return super().decode(ids)


@cache
def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    """One of each kind that a server may have, all with a token for every byte."""
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    settings = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True, **plain}
    pieces = _train_sentencepiece(folder, **settings)
    return {
        "bytes": ByteLevelTokenizer(),
        "byte level": load_tokenizer_json(str(write_folder(folder / "a", byte_level())), "HFTokenizer"),
        "marks": load_tokenizer_json(str(write_folder(folder / "b", word_marks())), "HFTokenizer"),
        "pieces": build_tokenizer(TokenizerSpec("GPTSentencePieceTokenizer", model=pieces)),
        "llama": build_tokenizer(TokenizerSpec("Llama2Tokenizer", model=pieces)),
        "megatron": build_tokenizer(TokenizerSpec("SentencePieceTokenizer", model=pieces)),
    }


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, Tokenizer]:
    return tokenizers(tmp_path_factory.mktemp("tokenizers"))


def streamed(decoder: Decoder, ids: list[int]) -> list[str]:
    """What each token adds, and the rest."""
    return [*(decoder.add(i) for i in ids), decoder.flush()]


def test_deltas_add_up_to_the_whole_text_behind_any_prompt(kinds):
    for name, tokenizer in kinds.items():
        texts = TokenTexts(tokenizer)
        for text in HARD:
            ids = tokenizer.encode(f"a {text}")
            whole = tokenizer.decode(ids)
            shown = ""
            for cut in range(len(ids)):
                before, after = ids[:cut], ids[cut:]
                if whole.startswith(tokenizer.decode(before)):  # else the cut is in a character
                    shown = tokenizer.decode(before)
                if cut % (1 + len(ids) // 30):
                    continue
                decoder = Decoder(texts, before, skip_special=False, complete=False)
                got = "".join(streamed(decoder, after))
                assert shown + got == whole, (name, text, cut)


def test_a_delta_has_no_part_of_a_character_and_no_characters_are_held_once_it_is_whole():
    deltas = streamed(Decoder(BYTES), list("a私🙂!".encode()))
    assert deltas == ["a", "", "", "私", "", "", "", "🙂", "!", ""]


def test_a_leading_space_is_kept_behind_a_prompt_and_left_out_without_one(kinds):
    ids = kinds["llama"].encode("the fox")[1:]
    texts = TokenTexts(kinds["llama"])
    assert "".join(streamed(Decoder(texts, kinds["llama"].encode("over")), ids)) == " the fox"
    assert "".join(streamed(Decoder(texts), ids)) == "the fox"
    null = TokenTexts(NullTokenizer(9))
    assert streamed(Decoder(null, [1, 2]), [3, 4]) == [" 3", " 4", ""]


def test_bytes_that_are_never_a_character_come_at_last_and_cost_little():
    spy = Spy()
    decoder = Decoder(TokenTexts(spy))
    spy.decoded = 0
    deltas = streamed(decoder, [0xFF] * 2000)
    assert "".join(deltas) == LOST * 2000
    assert "".join(deltas[:10])  # and not only at the end
    assert spy.decoded < 2000 * 60
    assert "".join(streamed(decoder, list("é".encode()))) == "é"


def test_an_incomplete_end_is_flushed_with_a_replacement():
    assert streamed(Decoder(BYTES), [*b"ab", 0xE7, 0xA7]) == ["a", "b", "", "", LOST]


def test_sent_text_never_falls_whatever_bytes_come(kinds):
    draw = random.Random(3)
    for tokenizer in kinds.values():
        texts = TokenTexts(tokenizer)
        for _ in range(20):
            ids = [draw.randrange(tokenizer.vocab_size) for _ in range(60)]
            try:
                tokenizer.decode(ids)
            except Exception:  # an id without a token
                continue
            decoder, sizes = Decoder(texts, ids[:5]), []
            for i in ids[5:]:
                decoder.add(i)
                sizes.append(decoder._sent)
            assert min(sizes) >= 0
            assert len(decoder._window) <= 33


@over_table(("skip", "text"), [(True, "ab"), (False, "a<|endoftext|>b")])
def test_special_tokens_are_skipped_or_shown_in_a_stream_as_in_the_whole(skip, text):
    ids = [97, 256, 98]
    assert "".join(streamed(Decoder(BYTES, skip_special=skip), ids)) == text
    choice = ChoiceText(Decoder(BYTES, skip_special=skip))
    assert "".join(choice.add(Token(i)).text for i in ids) + choice.finish().text == text


def test_templates_special_tokens_are_special_too(kinds):
    texts = TokenTexts(kinds["byte level"])
    assert {texts.name(i) for i in texts.special} >= {"<|im_start|>", "<|eot_id|>", "</s>"}


def pieces(
    ids: list[int], rule: StopRule, texts: TokenTexts = BYTES, **options
) -> tuple[list[str], ChoiceText]:
    """The text of each piece until the choice ends."""
    choice = ChoiceText(Decoder(texts, **options), rule, texts.special)
    got: list[Piece] = []
    for i in ids:
        got.append(choice.add(Token(i)))
        if got[-1].ended:
            break
    else:
        got.append(choice.finish())
    shown = [row.id for piece in got for row in piece.tokens]
    assert shown == ids[: len(shown)]
    return [piece.text for piece in got], choice


class Chunks(NullTokenizer):
    """A tokenizer of given pieces."""

    def __init__(self, *parts: str):
        super().__init__(len(parts))
        self.parts = (*parts, "<end>")

    def decode(self, ids):
        return "".join(self.parts[i] for i in ids)


def test_a_stop_string_over_three_tokens_is_held_back_and_never_shown():
    texts = TokenTexts(Chunks("a,", "b", ",c", "d"))
    got, choice = pieces([0, 1, 2, 3], StopRule(("b,c",)), texts)
    assert got == ["a,", "", ""]
    assert choice.count == 3  # the tokens that were made
    assert pieces([0, 1, 3], StopRule(("b,c",)), texts)[0] == ["a,", "", "bd", ""]
    assert pieces([0, 1], StopRule(("b,c",)), texts)[0] == ["a,", "", "b"]  # flushed at the end
    assert pieces([0, 1, 2, 3], StopRule(("b,c",), include=True), texts)[0] == ["a,", "", "b,c"]


def test_a_stop_inside_a_token_cuts_the_text_and_keeps_the_token():
    texts = TokenTexts(Chunks("one", " two.three", " four"))
    choice = ChoiceText(Decoder(texts), StopRule((".",)))
    first, second = choice.add(Token(0)), choice.add(Token(1))
    assert (first.text, second.text, second.ended) == ("one", " two", True)
    assert [row.id for row in second.tokens] == [1]
    assert choice.count == 2


def test_scores_end_with_the_token_that_the_stop_begins_in():
    texts = TokenTexts(Chunks("a,", "b", ",", "c"))
    for include, last in ((False, 1), (True, 3)):
        choice = ChoiceText(Decoder(texts), StopRule(("b,c",), include=include))
        tokens = [row.id for i in range(4) for row in choice.add(Token(i)).tokens]
        assert tokens[-1] == last
        assert choice.count == 4


@over_table(
    ("stops", "text", "shown"),
    [
        (("c", "bcd"), "abcd", "a"),
        (("bcd", "c"), "abcd", "a"),
        (("aab",), "aaab", "a"),
        (("xyx",), "xyxyx", ""),
        (("é",), "café au", "caf"),
        (("\n\n",), "a\n\n", "a"),
        ((" END",), "no end", "no end"),
    ],
)
def test_the_earliest_stop_counts(stops, text, shown):
    whole = TokenTexts(Chunks(text))
    assert "".join(pieces([0], StopRule(stops), whole)[0]) == shown
    if stops != ("c", "bcd") and stops != ("bcd", "c"):  # by bytes, the shorter one is complete before
        assert "".join(pieces(list(text.encode()), StopRule(stops))[0]) == shown


def test_streams_with_stops_equal_their_whole_texts():
    draw = random.Random(5)
    for _ in range(300):
        text = "".join(draw.choices("ab,é🙂", k=draw.randrange(1, 25)))
        stop = "".join(draw.choices("ab,é🙂", k=draw.randrange(1, 4)))
        got = "".join(pieces(list(text.encode()), StopRule((stop,)))[0])
        assert got == text.partition(stop)[0]


def test_stops_before_min_tokens_do_not_count():
    got, choice = pieces(list(b"a.b.c"), StopRule((".",), min_tokens=3))
    assert "".join(got) == "a.b"
    assert choice.count == 4


def test_a_special_tokens_text_is_not_split_by_what_a_stop_may_begin_with():
    texts = TokenTexts(Chunks("a", "<|im_end|>", "b"))
    texts.special = frozenset({1})
    got, _ = pieces([0, 1, 2], StopRule(("d|>x",)), texts, skip_special=False)
    assert got == ["a", "", "<|im_end|>b", ""]


def test_offsets_count_characters_also_behind_characters_of_several_tokens():
    choice = ChoiceText(Decoder(BYTES), start=10)
    rows = [row for i in "a私🙂b".encode() for row in choice.add(Token(i)).tokens]
    assert [row.start for row in rows] == [10, 11, 11, 11, 12, 12, 12, 12, 13]
    assert rows[-1].end == 14


def test_the_token_that_ended_a_choice_has_no_text():
    choice = ChoiceText(Decoder(BYTES, skip_special=False))
    assert choice.add(Token(97)).text == "a"
    assert choice.add(Token(256), silent=True).text + choice.finish().text == ""
    assert choice.count == 2


def test_names_of_tokens_have_their_leading_space(kinds):
    texts = TokenTexts(kinds["llama"])
    ids = kinds["llama"].encode("the fox")
    assert "".join(texts.name(i) for i in ids[1:]) == " the fox"
    assert BYTES.name(0xE7) == LOST
