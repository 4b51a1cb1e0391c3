"""The datasets of a run, from its configuration: one builder and one function for each family of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megazero.config.compat.blends import expanded
from megazero.config.tree.config import Config
from megazero.config.tree.data import DataConfig
from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.bert.mock import MockBERTDataset
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.blended import parse_blend
from megazero.data.build import (
    DatasetBuilder,
    DatasetRequest,
    Datasets,
    DataSources,
    Sizes,
    build_datasets,
    default_cache,
)
from megazero.data.conversations.mask import refuse_mask
from megazero.data.fim import infill_of
from megazero.data.gpt_dataset import DocumentEnds, GPTDataset, GPTSettings
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.mock import MockGPTDataset
from megazero.data.packed.dataset import PackedDataset
from megazero.data.splits import SPLIT_NAMES
from megazero.data.t5.dataset import MockT5Dataset, T5Dataset, T5Settings
from megazero.data.t5.pairs import pair_datasets
from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError

_NO_TOKEN = -1  # an id that no token has


class TextVocabulary(Protocol):
    """The part of a vocabulary that datasets read."""

    @property
    def size(self) -> int:
        """The number of entries, without padding."""

    @property
    def eod(self) -> int | None:
        """The id that ends a document, if there is one."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if only the size is known."""


@dataclass(frozen=True)
class GPTBuilder:
    """Builds GPT datasets. Splits divide the sequences.

    pack: build samples of whole documents by best-fit packing, instead of documents laid end to end.
    prepared: paths of the .npy files with the training split's document, sample and shuffle index; None to
    build them.
    """

    settings: GPTSettings
    pack: bool = False
    prepared: tuple[str, str, str] | None = None
    unit = "sequences"

    def units(self, indexed: IndexedDataset) -> int:
        return len(indexed)

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> GPTDataset | PackedDataset:
        if self.settings.ends.infill is not None:
            refuse_mask(indexed.prefix, indexed.mask, "with --fim-data", "leave that out")
        if self.prepared is not None and name == SPLIT_NAMES[0]:
            return GPTDataset(indexed, units, num_samples, self.settings, name, epochs, self.prepared)
        kind = PackedDataset if self.pack else GPTDataset
        return kind(indexed, units, num_samples, self.settings, name, epochs)

    def mock(self, num_samples: int, name: str) -> MockGPTDataset:
        return MockGPTDataset(num_samples, self.settings, name)


@dataclass(frozen=True)
class BERTBuilder:
    """Builds BERT datasets. Splits divide the documents, so that no document lies in two splits.

    prepared: path of the .npy file with the training split's sample map; None to build the map.
    """

    settings: BERTSettings
    prepared: str | None = None
    unit = "documents"

    def units(self, indexed: IndexedDataset) -> int:
        return indexed.document_index.size - 1

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> BERTDataset:
        prepared = self.prepared if name == SPLIT_NAMES[0] else None
        return BERTDataset(indexed, units, num_samples, self.settings, name, epochs, prepared)

    def mock(self, num_samples: int, name: str) -> MockBERTDataset:
        return MockBERTDataset(num_samples, self.settings, name)


@dataclass(frozen=True)
class T5Builder(BERTBuilder):
    """Builds T5 datasets. Splits divide the documents, as BERT's do."""

    settings: T5Settings

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> T5Dataset:
        return T5Dataset(indexed, units, num_samples, self.settings, name, epochs)

    def mock(self, num_samples: int, name: str) -> MockT5Dataset:
        return MockT5Dataset(num_samples, self.settings, name)


_: tuple[type[DatasetBuilder], ...] = (GPTBuilder, BERTBuilder, T5Builder)


def gpt_datasets(config: Config, vocabulary: TextVocabulary, sizes: Sizes) -> Datasets:
    """The three splits of a run that trains a GPT.

    Args:
        config: the run's configuration.
        vocabulary: the vocabulary that the token ids belong to.
        sizes: the least number of samples of train, valid and test.

    Raises:
        DataError: files are missing or damaged, or hold too few tokens for one sample.
    """
    data, eod, packed = config.data, vocabulary.eod, config.data.pack == "best-fit"
    if packed and eod is None and not data.eod_mask_loss:
        eod = _NO_TOKEN  # a packing knows where documents begin, so that no token has to mark their ends
    infill = infill_of(config, vocabulary.size, vocabulary.eod, vocabulary.tokenizer)
    settings = GPTSettings(
        sequence_length=config.model.seq_length,
        seed=config.training.seed,
        cache_dir=_cache_of(data),
        vocab_size=vocabulary.size,
        ends=DocumentEnds(
            eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss, infill
        ),
        index_memory_gib=data.index_memory_gib,
    )
    document, sample = data.train_doc_idx_path, data.train_sample_idx_path
    shuffle = data.train_shuffle_idx_path
    prepared = (document, sample, shuffle) if document and sample and shuffle else None
    return build_datasets(_request(config, GPTBuilder(settings, packed, prepared), sizes))


def bert_datasets(config: Config, vocabulary: TextVocabulary, sizes: Sizes) -> Datasets:
    """The three splits of a run that trains a BERT; arguments and errors as in `gpt_datasets`.

    Raises:
        DataError: also if the vocabulary is not a WordPiece or lacks a special token, or if the documents are
            not split into sentences.
    """
    data = config.data
    settings = BERTSettings(
        sequence_length=config.model.seq_length,
        words=_word_pieces(vocabulary, data.mock_data),
        seed=config.training.seed,
        cache_dir=_cache_of(data),
        mask_prob=data.mask_prob,
        short_seq_prob=data.short_seq_prob,
        binary_head=config.model.bert_binary_head,
    )
    return build_datasets(_request(config, BERTBuilder(settings, data.train_idx_path), sizes))


def t5_datasets(config: Config, vocabulary: TextVocabulary, sizes: Sizes) -> Datasets:
    """The three splits of a run that trains a T5; arguments and errors as in `gpt_datasets`.

    Raises:
        DataError: also if the vocabulary lacks a special token, or has fewer sentinels than a sample may have
            spans.
    """
    data, tokenizer = config.data, vocabulary.tokenizer
    ids = SpanVocabulary.numbered(vocabulary.size) if tokenizer is None else SpanVocabulary.of(tokenizer)
    settings = T5Settings(
        sequence_length=config.model.seq_length,
        words=ids.words,
        seed=config.training.seed,
        cache_dir=_cache_of(data),
        mask_prob=data.mask_prob,
        short_seq_prob=data.short_seq_prob,
        vocabulary=ids,
        decoder_length=config.model.decoder_length,
    )
    if data.t5_columns is not None:
        return pair_datasets(data, settings, tokenizer, sizes)
    return build_datasets(_request(config, T5Builder(settings), sizes))


def _word_pieces(vocabulary: TextVocabulary, mock: bool) -> WordPieces:
    tokenizer = vocabulary.tokenizer
    if mock and (tokenizer is None or tokenizer.word_pieces() is None):
        return WordPieces.numbered(vocabulary.size)  # random text needs no words
    if tokenizer is None:
        raise DataError(
            "`--tokenizer-type` must be given for BERT, which masks whole words, but is not; give "
            "BertWordPieceLowerCase or BertWordPieceCase with --vocab-file, or HFTokenizer with "
            "--tokenizer-model."
        )
    return WordPieces.of(tokenizer)


def _request(config: Config, builder: DatasetBuilder, sizes: Sizes) -> DatasetRequest:
    data, by_metric = config.data, bool(config.data_sampling.curriculum_metrics)
    sources = DataSources(
        data_path=expanded(data.data_path, "train"),
        split=data.split,
        train_data_path=expanded(data.train_data_path, "train"),
        valid_data_path=expanded(data.valid_data_path, "valid"),
        test_data_path=expanded(data.test_data_path, "test"),
        mock=data.mock_data,
    )
    return DatasetRequest(
        builder=builder,
        num_samples=(_train_size(data, sizes[0], by_metric=by_metric), *sizes[1:]),
        sources=sources,
        train_exact_num_epochs=data.train_data_exact_num_epochs,
        guarded=data.verify_data,
        cache=data.object_cache,
    )


def _cache_of(data: DataConfig) -> str | None:
    paths = expanded(data.data_path or data.train_data_path, "train")
    return data.data_cache_path or default_cache(paths, data.object_cache)


def _train_size(data: DataConfig, wanted: int | None, *, by_metric: bool) -> int | None:
    """The number of training samples to build; None for one epoch.

    A cyclic order or a curriculum draws from one epoch of the data, whatever the batch size and the length of
    the training. Two exceptions: a weighted blend has no epoch, as its weights say how much each dataset
    gives; and with `data_sharding` the order is Megatron's, over as many samples as Megatron builds.
    """
    endless = data.dataloader_type == "cyclic" or by_metric
    if not wanted or not endless or data.data_sharding:
        return wanted
    source = expanded(data.train_data_path or data.data_path, "train")
    weighted = bool(source) and parse_blend(source, must_exist=False)[0][0] is not None
    return wanted if weighted else None
