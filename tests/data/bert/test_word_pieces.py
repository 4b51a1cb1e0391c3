from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from megazero.data.bert.word_pieces import WordPieces
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from tests.tables import over_table

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "un", "##able"]


def vocab_txt(tmp_path, kind="BertWordPieceCase", extra_ids=0):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n")
    return build_tokenizer(TokenizerSpec(kind, vocab_file=str(path), extra_ids=extra_ids))


def tokenizer_json(tmp_path, model, roles=None):
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(model).save(str(path))
    if roles is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    return build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tmp_path)))


def test_a_vocab_txt_with_the_ids_that_megatron_appends(tmp_path):
    words = WordPieces.of(vocab_txt(tmp_path, extra_ids=2))
    assert (words.cls, words.sep, words.mask, words.pad) == (2, 3, 4, 0)
    assert np.flatnonzero(words.continues).tolist() == [7, 9]
    # [BOS], [EOS] and two extra ids follow the file, and replacements may be any of all.
    assert words.replacements.tolist() == list(range(14))
    assert words.size == 14
    assert words.plain.tolist() == [1, *range(5, 14)]


def test_a_tokenizer_json_of_word_pieces(tmp_path):
    ids = {piece: 3 * i for i, piece in enumerate(reversed(VOCABULARY))}
    words = WordPieces.of(tokenizer_json(tmp_path, models.WordPiece(ids, unk_token="[UNK]")))
    assert (words.cls, words.sep, words.mask, words.pad) == (21, 18, 15, 27)
    assert np.flatnonzero(words.continues).tolist() == [0, 6]
    # Numbers without a token are never drawn, and the others in their order, whatever the library's.
    assert words.replacements.tolist() == list(range(0, 30, 3))
    assert words.size == 28


def test_roles_may_be_named_beside_it(tmp_path):
    names = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<m>", "pad_token": "<p>"}
    ids = {piece: i for i, piece in enumerate([*names.values(), "[CLS]", "[UNK]", "a"])}
    words = WordPieces.of(tokenizer_json(tmp_path, models.WordPiece(ids, unk_token="[UNK]"), names))
    assert (words.cls, words.sep, words.mask, words.pad) == (0, 1, 2, 3)


@over_table("missing", [["[MASK]"], ["[CLS]", "[PAD]"], ["[CLS]", "[SEP]", "[MASK]", "[PAD]"]])
def test_missing_special_tokens_are_named(tmp_path, missing):
    ids = {piece: i for i, piece in enumerate(VOCABULARY) if piece not in missing}
    tokenizer = tokenizer_json(tmp_path, models.WordPiece(ids, unk_token="[UNK]"))
    with pytest.raises(DataError) as caught:
        WordPieces.of(tokenizer)
    assert str(caught.value) == (
        "`vocabulary` must contain [CLS], [SEP], [MASK] and [PAD], but lacks "
        f"{' and '.join(missing)}; add them to it."
    )


def test_other_kinds_of_vocabularies_are_refused(tmp_path):
    with pytest.raises(DataError, match="must be a WordPiece vocabulary, but ByteLevelTokenizer is none"):
        WordPieces.of(build_tokenizer(TokenizerSpec("ByteLevelTokenizer")))
    with pytest.raises(DataError, match="but HFTokenizer is none"):
        WordPieces.of(tokenizer_json(tmp_path, models.WordLevel(dict.fromkeys(VOCABULARY, 0))))


def test_numbers_alone_for_runs_without_a_tokenizer():
    words = WordPieces.numbered(7)
    assert (words.pad, words.cls, words.sep, words.mask) == (0, 2, 3, 4)
    assert words.plain.tolist() == [1, 5, 6]
    assert not words.continues.any()
    with pytest.raises(DataError, match="`vocab_size` must be at least 6, .* but is 5"):
        WordPieces.numbered(5)


def test_a_vocabulary_of_special_tokens_has_no_words():
    words = replace(WordPieces.numbered(6), replacements=np.array([0, 2, 3, 4]))
    with pytest.raises(DataError, match="must hold words, but its 4 ids are special tokens"):
        words.plain  # noqa: B018


def test_the_fingerprint_tells_vocabularies_apart():
    words = WordPieces.numbered(9)
    others = [
        replace(words, mask=5),
        replace(words, continues=np.arange(9) == 8),
        replace(words, replacements=np.arange(8)),
        WordPieces.numbered(10),
    ]
    assert words.fingerprint == WordPieces.numbered(9).fingerprint
    assert len({words.fingerprint, *(other.fingerprint for other in others)}) == 5
