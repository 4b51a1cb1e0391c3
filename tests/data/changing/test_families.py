"""Blends of BERT's, T5's and packed samples change like GPT's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megazero.config.tree.config import Config
from megazero.data.bert.dataset import BERTSettings
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.build import DatasetBuilder, DatasetRequest, DataSources, Sizes, build_datasets
from megazero.data.changing.blend import ChangingBlend
from megazero.data.changing.history import History
from megazero.data.changing.start import BEGINNING, Before, changing_datasets
from megazero.data.from_config import BERTBuilder, GPTBuilder, T5Builder
from megazero.data.gpt_dataset import DocumentEnds, GPTSettings
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data.t5.dataset import T5Settings
from megazero.data.t5.vocabulary import SpanVocabulary
from tests.data.changing.test_start import config_of

SIZE = 200
SPANS = SpanVocabulary.numbered(SIZE)


def bert(seed: int, cache: str | None) -> BERTBuilder:
    return BERTBuilder(BERTSettings(24, WordPieces.numbered(SIZE), seed, cache))


def t5(seed: int, cache: str | None) -> T5Builder:
    return T5Builder(T5Settings(24, SPANS.words, seed, cache, vocabulary=SPANS, decoder_length=12))


def packed(seed: int, cache: str | None) -> GPTBuilder:
    ends = DocumentEnds(-1, reset_attention_mask=True)
    return GPTBuilder(GPTSettings(16, seed, cache, SIZE, ends), pack=True)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("family", [bert, pytest.param(t5, marks=SLOW), pytest.param(packed, marks=SLOW)])
def test_epochs_and_edits(family: Callable[[int, str | None], DatasetBuilder], tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for name, documents in (("a", 20), ("b", 12), ("c", 9)):
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            for _ in range(documents):
                parts = [rng.integers(5, 80, rng.integers(3, 15)) for _ in range(4)]
                writer.add_document([np.concatenate(parts)] if family is packed else parts)

    def build(config: Config, sizes: Sizes):
        own = config.data.data_path
        made = family(config.training.seed, config.data.data_cache_path)
        return build_datasets(DatasetRequest(made, sizes, DataSources(data_path=own, split="1,0,0")))

    def opened(before: Before) -> ChangingBlend:
        config = config_of(f"--data-args-path {tmp_path}/blend --split 1,0,0")
        blend = changing_datasets(config, (30, 0, 0), build, SIZE, before)[0]
        assert isinstance(blend, ChangingBlend)
        return blend

    def write(*words: str) -> tuple[str, ...]:
        given = tuple(word if word.isdigit() else f"{tmp_path}/{word}" for word in words)
        (tmp_path / "blend").write_text(" ".join(given))
        return given

    blend = opened(Before()) if write("7", "a", "3", "b") else None
    plain = build(config_of(f"--data-path 7 {tmp_path}/a 3 {tmp_path}/b --split 1,0,0"), (30, 0, 0))[0]
    for key, array in plain.batch(range(30)).items():
        assert np.array_equal(array, blend.batch(range(30))[key])
    history = History.model_validate_json(blend.history.model_dump_json())
    write("1", "b", "1", "c")
    edited = opened(Before(history, 10))
    last = edited._size - 1
    longer = ChangingBlend(edited.history, edited.library, 400, 10)
    tokens = longer.batch(range(10, 400))["tokens"]
    assert np.array_equal(tokens[: last - 9], edited.batch(range(10, last + 1))["tokens"])
    sources, owners, samples = longer.located(np.arange(10, 400))
    assert {sources[owner].name for owner in owners} == {s.source for s in edited.history.segments[1].shares}
    for source in np.unique(owners):
        own = samples[owners == source]
        assert own.tolist() == list(range(own[0], own[0] + len(own)))
    assert opened(BEGINNING).history.samples == 30
