"""T5's samples: Megatron-Core's, put together again, refused, random, and pairs from files."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megazero.data.t5.dataset import MockT5Dataset, T5Dataset
from megazero.data.t5.pairs import PairDataset, read_pairs
from megazero.data.t5.spans import PairShape, cut_spans
from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.errors import DataError
from tests.data.bert.golden import golden_corpus
from tests.data.t5.golden import CASES, END, SENTINELS, START, VOCABULARY, digest, settings_of
from tests.tables import over_table

CASE = CASES[0]


@over_table("case", CASES, ids=lambda case: f"{case.encoder}-{case.decoder}-{case.seed}")
def test_samples_are_what_megatron_core_makes(case, tmp_path):
    dataset = T5Dataset(golden_corpus(tmp_path), range(40), case.num_samples, settings_of(case))
    assert len(dataset) == case.rows
    assert digest(dataset.batch(range(len(dataset)))) == case.digest


def put_together(sample: dict[str, np.ndarray]) -> list[int]:
    """A sample's text with the decoder's spans in the places of the encoder's sentinels."""
    answer = sample["labels"][: sample["decoder_lengths"]].tolist()
    assert answer[-1] == END
    spans: dict[int, list[int]] = {}
    for token in answer[:-1]:
        if token in SENTINELS:
            spans[token] = current = []
        else:
            current.append(token)
    text = []
    for token in sample["tokens"][: sample["lengths"]].tolist():
        text += spans.pop(token) if token in SENTINELS else [token]
    assert not spans
    return text


def test_spans_put_back_are_the_text(tmp_path):
    indexed = golden_corpus(tmp_path)
    dataset = T5Dataset(indexed, range(40), 100, settings_of(CASE))
    shares = []
    for number, (first, end, target) in enumerate(dataset.rows.tolist()):
        sample = dataset[number]
        text = [int(token) for place in range(first, end) for token in indexed[place]][:target]
        assert put_together(sample) == text
        given = sample["decoder_tokens"][: sample["decoder_lengths"]].tolist()
        assert given == [START, *sample["labels"][: len(given) - 1].tolist()]
        assert sample["loss_mask"].sum() == len(given)
        used = [token for token in given if token in SENTINELS]
        assert used == list(SENTINELS[: len(used)])
        shares.append((len(given) - 1 - len(used)) / len(text))
    assert 0.1 < np.mean(shares) < 0.2


def test_words_are_cut_out_whole():
    random = np.random.RandomState(3)
    tokens = [5 + i % 35 for i in range(60)]
    _, answer = cut_spans(tokens, 60, 0.3, VOCABULARY, random)
    firsts = [answer[i + 1] for i, token in enumerate(answer) if token in SENTINELS]
    assert len(firsts) > 2
    assert not VOCABULARY.words.continues[firsts].any()


def test_an_answer_that_is_too_long_is_cut_and_says_so():
    shape = PairShape(4, 3, 0)
    arrays = shape.arrays([([7, 8, 9], [5, 6, 1]), ([7] * 5, [5] * 4)], start=2)
    assert arrays["decoder_tokens"].tolist() == [[2, 5, 6], [2, 5, 5]]
    assert arrays["labels"].tolist() == [[5, 6, 1], [5, 5, 5]]
    assert arrays["tokens"].tolist() == [[7, 8, 9, 0], [7, 7, 7, 7]]
    assert arrays["truncated"].tolist() == [0, 1]
    assert arrays["lengths"].tolist() == [3, 4]


def test_too_few_sentinels_are_refused():
    few = replace(VOCABULARY, sentinels=SENTINELS[:3])
    with pytest.raises(DataError, match="`vocab_extra_ids` must be at least 4 for T5, .* has 3 sentinels"):
        replace(settings_of(CASE), vocabulary=few)


def test_foreign_ids_are_refused(tmp_path):
    indexed = golden_corpus(tmp_path)
    small = replace(VOCABULARY, words=replace(VOCABULARY.words, continues=np.zeros(20, dtype=bool)))
    dataset = T5Dataset(indexed, range(40), None, replace(settings_of(CASE), vocabulary=small))
    with pytest.raises(DataError, match="`token id` must be in 0..19, but those of sample 0"):
        dataset.batch([0])


def test_what_samples_depend_on_is_described(tmp_path):
    indexed = golden_corpus(tmp_path)
    changes = ({}, {"mask_prob": 0.2}, {"decoder_length": 30}, {"seed": 1}, {"sequence_length": 40})
    texts = {
        json.dumps(T5Dataset(indexed, range(40), 50, replace(settings_of(CASE), **change)).description)
        for change in changes
    }
    assert len(texts) == len(changes)


def test_mock_samples_are_functions_of_their_numbers():
    vocabulary = SpanVocabulary.numbered(200)
    settings = replace(settings_of(CASE), vocabulary=vocabulary, words=vocabulary.words)
    mock = MockT5Dataset(50, settings)
    batch = mock.batch([7, 3])
    for name, array in batch.items():
        np.testing.assert_array_equal(array, np.stack([mock[7][name], mock[3][name]]))
    assert (batch["lengths"] > 0).all()
    other = MockT5Dataset(50, settings, "valid").batch([7, 3])
    assert not np.array_equal(batch["tokens"], other["tokens"])


def test_a_vocabulary_of_word_pieces(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    spec = TokenizerSpec("BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt"), extra_ids=4)
    vocabulary = SpanVocabulary.of(build_tokenizer(spec))
    assert (vocabulary.end, vocabulary.start, vocabulary.sentinels) == (9, 8, (10, 11, 12, 13))
    assert np.flatnonzero(vocabulary.words.continues).tolist() == [7]
    assert vocabulary.plain.tolist() == [1, 5, 6, 7]


def test_a_vocabulary_as_t5s_own_starts_with_padding(tmp_path):
    import tokenizers
    from tokenizers import models

    names = ["<pad>", "</s>", "<unk>", "a", "b", "<extra_id_1>", "<extra_id_0>"]
    vocab = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.add_special_tokens(["<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    vocabulary = SpanVocabulary.of(build_tokenizer(TokenizerSpec("HFTokenizer", model=str(tmp_path))))
    assert (vocabulary.start, vocabulary.end, vocabulary.sentinels) == (0, 1, (6, 5))


def test_pairs_from_a_file_come_once_in_an_epoch(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(10))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    spec = TokenizerSpec("BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt"))
    tokenizer = build_tokenizer(spec)
    rows = [{"question": f"{i}", "answer": f"{i} {i}"} for i in range(5)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = read_pairs(str(tmp_path / "pairs.jsonl"), ("question", "answer"), tokenizer, 99)
    assert pairs[2] == ([7, 99], [7, 7, 99])
    vocabulary = SpanVocabulary.of(tokenizer)
    dataset = PairDataset(pairs, 10, PairShape(4, 3, 0), vocabulary, seed=1)
    firsts = dataset.batch(range(10))["tokens"][:, 0].tolist()
    assert sorted(firsts[:5]) == sorted(firsts[5:]) == [5, 6, 7, 8, 9]
    assert firsts[:5] != firsts[5:]
    in_order = PairDataset(pairs, None, PairShape(4, 3, 0), vocabulary, seed=None, name="valid")
    assert in_order.batch(range(5))["tokens"][:, 0].tolist() == [5, 6, 7, 8, 9]
    with pytest.raises(DataError, match="`reply` must be a column"):
        read_pairs(str(tmp_path / "pairs.jsonl"), ("question", "reply"), tokenizer, 99)
