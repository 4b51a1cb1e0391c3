from __future__ import annotations

from megazero.data.tokenizers import wordpiece
from megazero.data.tokenizers.base import TokenBatch
from megazero.data.tokenizers.wordpiece import WordCache


class _Letters:
    """Encodes a part as its letters' codes, and remembers what it was asked."""

    def __init__(self):
        self.asked: list[list[str]] = []

    def __call__(self, parts):
        self.asked.append(sorted(parts))
        return TokenBatch.of([[ord(letter) for letter in part] for part in parts])


def _rows(cache, *texts):
    return ["".join(map(chr, row)) for row in cache.encode_batch(texts).rows()]


def test_each_part_is_encoded_once():
    encode = _Letters()
    cache = WordCache(encode, lambda word: word.split("-"))
    assert _rows(cache, "ab cd-ab", "", "cd") == ["abcdab", "", "cd"]
    assert _rows(cache, "ab-ef ab") == ["abefab"]
    assert _rows(cache, "ef ab") == ["efab"]
    assert [asked for asked in encode.asked if asked] == [["ab", "cd"], ["ef"]]


def test_long_words_are_not_kept_and_too_many_are_forgotten(monkeypatch):
    monkeypatch.setattr(wordpiece, "_MOST_CACHED_WORDS", 2)
    encode = _Letters()
    cache = WordCache(encode, lambda word: [word])
    long = "x" * 65
    assert _rows(cache, f"{long} a") == [f"{long}a"]
    assert _rows(cache, f"{long} b c") == [f"{long}bc"]
    assert encode.asked == [["a", long], ["b", "c", long]]
    assert _rows(cache, "a") == ["a"]
    assert encode.asked[-1] == ["a"]
