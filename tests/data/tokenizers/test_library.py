from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from tests.data.tokenizers.conftest import HARD_TEXTS


def _gpt2(folder):
    return build_tokenizer(
        TokenizerSpec("GPT2BPETokenizer", str(folder / "vocab.json"), str(folder / "merges.txt"))
    )


@pytest.fixture
def folder(bpe_dir, tmp_path):
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        shutil.copy(bpe_dir / name, tmp_path / name)
    return tmp_path


def test_hand_made_bpe_gives_the_ids_worked_out_by_hand(tmp_path, gpt2):
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {
        "lo": 256,
        "low": 257,
        "Ġlow": 258,
        "<|endoftext|>": 259,
    }
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nl o\nlo w\nĠ low\n")
    tokenizer = _gpt2(tmp_path)
    assert tokenizer.encode("low low lo") == [257, 258, vocab["Ġ"], 256]
    assert (tokenizer.vocab_size, tokenizer.eod) == (260, 259)
    assert tokenizer.decode([257, 258, 259]) == "low low<|endoftext|>"


def test_gpt2_and_tokenizer_json_give_identical_ids(gpt2, from_json):
    assert gpt2.vocab_size == from_json.vocab_size == 350
    assert gpt2.eod == from_json.eod == 0
    for text in HARD_TEXTS:
        assert gpt2.encode(text) == from_json.encode(text)


@settings(deadline=None, max_examples=100)
@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_decode_inverts_encode(gpt2, text):
    assert gpt2.decode(gpt2.encode(text)) == text


def test_batch_is_the_texts_one_by_one(gpt2):
    batch = gpt2.encode_batch(HARD_TEXTS)
    assert [row.tolist() for row in batch.rows()] == [gpt2.encode(text) for text in HARD_TEXTS]


def test_literal_special_token_in_a_document_stays_plain_text(gpt2, from_json):
    for tokenizer in (gpt2, from_json):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eod not in ids
        assert len(ids) > 3
        assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_truncation_and_padding_in_a_tokenizer_json_do_not_change_documents(folder):
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = build_tokenizer(TokenizerSpec("HFTokenizer", model=str(folder)))
    assert len(tokenizer.encode("z" * 40)) > 8
    assert len(tokenizer.encode("z")) == 1


def test_roles_come_from_the_config_beside_tokenizer_json(folder):
    config = {"eos_token": {"content": "the"}, "bos_token": "<|endoftext|>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer(TokenizerSpec("HFTokenizer", model=str(folder / "tokenizer.json")))
    vocab = json.loads((folder / "vocab.json").read_text())
    assert tokenizer.special_ids == {"eos": vocab["the"], "bos": 0}
    assert tokenizer.eod == vocab["the"]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("token", [[], ["the"], 5, True, {}, {"content": ["the"]}])
def test_a_token_of_the_wrong_shape_is_refused(folder, name, token):
    (folder / name).write_text(json.dumps({"eos_token": token}))
    with pytest.raises(DataError, match=rf"`eos_token` must be text, an object .* but .*{name} has "):
        build_tokenizer(TokenizerSpec("HFTokenizer", model=str(folder)))


@pytest.mark.parametrize("token", ["thee", "", "\ud800"])
def test_an_end_of_documents_that_is_no_token_is_refused(folder, token):
    """`<|endoftext|>` took its place, and documents ended with something else than the settings say."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    with pytest.raises(DataError, match=r"`eos_token` must be a token of .*tokenizer.json, but "):
        build_tokenizer(TokenizerSpec("HFTokenizer", model=str(folder)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": token}))
    assert build_tokenizer(TokenizerSpec("HFTokenizer", model=str(folder))).special_ids == {}


@pytest.mark.parametrize("number", [2**31, 2**32 - 1, 2**32 + 5])
def test_ids_with_large_gaps_are_refused(folder, number):
    """The library counts up to the largest id when it writes a vocabulary, and cuts ids to 32 bits."""
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocab | {"zzzz": number}))
    with pytest.raises(
        DataError, match=f"must number its 351 tokens without large gaps, but one has the id {number}"
    ):
        _gpt2(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zzzz"] = number
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        DataError, match=r"must number its 351 tokens without large gaps|must be a tokenizer.json"
    ):
        build_tokenizer(TokenizerSpec("HFTokenizer", model=str(folder)))


def test_a_vocabulary_without_tokens_is_refused(tmp_path):
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="must hold tokens, but holds none"):
        build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tmp_path)))


def test_a_text_without_tokens_is_a_data_error(tmp_path):
    """The library raises a plain Exception where a vocabulary of words has no token for unknown ones."""
    import tokenizers

    words = tokenizers.models.WordLevel({"fox": 0}, unk_token="<unk>")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tmp_path)))
    assert tokenizer.encode("fox") == [0]
    with pytest.raises(DataError, match=r"text must have tokens in this HFTokenizer, but has none \(.*UNK"):
        tokenizer.encode("dog")
    with pytest.raises(DataError, match=r"texts must have tokens in this HFTokenizer, but one has none"):
        tokenizer.encode_batch(["fox", "dog"])


def test_vocab_size_is_above_the_largest_id_when_ids_have_gaps(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zzzz"] = 500
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert build_tokenizer(TokenizerSpec("HFTokenizer", model=str(folder))).vocab_size == 501


def test_vocabulary_that_would_drop_bytes_is_refused(folder):
    vocab = json.loads((folder / "vocab.json").read_text())
    del vocab["÷"]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(DataError, match="lacks 1"):
        _gpt2(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    del content["model"]["vocab"]["÷"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="lacks 1"):
        build_tokenizer(TokenizerSpec("HFTokenizer", model=str(folder)))


def test_unfit_vocabularies_are_refused(folder):
    vocab = json.loads((folder / "vocab.json").read_text())
    path = folder / "vocab.json"
    path.write_text(json.dumps({token: i for token, i in vocab.items() if token != "<|endoftext|>"}))
    with pytest.raises(DataError, match=r"must contain <\|endoftext\|>"):
        _gpt2(folder)
    path.write_text(json.dumps(vocab | {"a": vocab["b"]}))
    with pytest.raises(DataError, match="its own id"):
        _gpt2(folder)
    path.write_text(json.dumps(vocab | {"a": -1}))
    with pytest.raises(DataError, match="must map tokens to ids"):
        _gpt2(folder)
    path.write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nqq zz\n")
    with pytest.raises(DataError, match="merge_file"):
        _gpt2(folder)


def test_decode_refuses_ids_beyond_the_vocabulary(gpt2):
    with pytest.raises(DataError, match=r"0\.\.349.*350"):
        gpt2.decode([350])
    with pytest.raises(DataError, match="-1"):
        gpt2.decode([-1])
