"""Train, validation and test datasets of a run, from what its command line says.

Sizes and order follow Megatron-Core: a lone prefix is used as it is; a weighted blend asks each dataset for
ceil(N w) samples, builds half a percent more as reserve, and is Σ ceil(N w) samples long; prefixes without
weights give one epoch each, mixed in proportion to their sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path
from typing import Protocol

from megazero.config.compat.blends import expanded, part_of, prefix_of
from megazero.config.tree.config import Config
from megazero.config.tree.data import DataConfig
from megazero.data.bert.builder import BERTBuilder
from megazero.data.bert.dataset import BERTSettings
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.blended import BlendedDataset, SampleDataset, parse_blend
from megazero.data.gpt_builder import GPTBuilder
from megazero.data.gpt_dataset import DocumentEnds, GPTSettings
from megazero.data.index_build import normalized
from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.data.splits import SPLIT_NAMES, SplitReading, split_ranges, warn_of_empty
from megazero.data.t5.builder import T5Builder, pair_datasets
from megazero.data.t5.dataset import T5Settings
from megazero.data.t5.vocabulary import SpanVocabulary
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError

_RESERVE = 0.005  # share of samples built beyond the request of each dataset of a weighted blend
_NO_TOKEN = -1  # an id that no token has
_MOCK_EPOCH = 100_000  # samples; as many sequences as Megatron-Core's mock data has

Datasets = tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]
Sizes = tuple[int | None, int | None, int | None]
"""The least samples of train, valid and test; 0 for none of that split, None for one epoch."""


class DatasetBuilder(Protocol):
    """The builder of a family of models' samples; the rest of this module is the same for all."""

    unit: str  # what split strings divide, in the plural

    @property
    def cache_dir(self) -> str | Path | None:
        """The folder of built indexes; None if they are not kept."""

    def units(self, indexed: IndexedDataset) -> int:
        """The number of units in a dataset."""

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> SampleDataset:
        """The samples of these units: at least so many, None for one epoch, or exactly `epochs` epochs."""

    def mock(self, num_samples: int, name: str) -> SampleDataset:
        """Random samples."""


_: tuple[type[DatasetBuilder], ...] = (GPTBuilder, BERTBuilder)


class TextVocabulary(Protocol):
    """A vocabulary as datasets need to know it."""

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
class DataSources:
    """The files of the three splits.

    data_path: a prefix, prefixes, or weights and prefixes, divided by `split`; or each split's own
    train_data_path, valid_data_path, test_data_path (then `split` is not used). mock: random tokens, no
    files. Raises DataError if sources contradict each other or there are none.
    """

    data_path: tuple[str, ...] = ()
    split: str = "969,30,1"
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    split_reading: SplitReading = SplitReading.MEGATRON_CORE
    mock: bool = False

    def __post_init__(self) -> None:
        given = [name for name, on in (("data_path", self.data_path), ("mock", self.mock)) if on]
        given += ["train_data_path/valid_data_path/test_data_path"] if any(self.own_paths) else []
        if len(given) != 1:
            raise DataError(
                "`data source` must be exactly one of data_path, train/valid/test_data_path and mock, but is "
                f"{' and '.join(given) or 'none'}; give one."
            )

    @property
    def own_paths(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return self.train_data_path, self.valid_data_path, self.test_data_path


@dataclass(frozen=True)
class DatasetRequest:
    """The datasets to build, and from which files.

    builder: makes the datasets. train_exact_num_epochs: make the training split exactly this many epochs
    long. guarded: notice damage and changes of the files while they are read, see `indexed/guard.py`.
    """

    builder: DatasetBuilder
    num_samples: Sizes
    sources: DataSources
    train_exact_num_epochs: int | None = None
    guarded: bool = False


def build_datasets(request: DatasetRequest) -> Datasets:
    """(train, valid, test), with None for a split that is empty or not wanted.

    Raises DataError for damaged or missing files, impossible blends and splits too small for one sample.
    """
    if request.sources.mock:
        train, valid, test = (
            None if size == 0 else request.builder.mock(size or _MOCK_EPOCH, name)
            for name, size in zip(SPLIT_NAMES, request.num_samples, strict=True)
        )
        return train, valid, test
    opened: dict[str, IndexedDataset] = {}
    built: list[SampleDataset | None] = []
    for number in range(len(SPLIT_NAMES)):
        built.append(_build_split(request, number, opened))
    train, valid, test = built
    return train, valid, test


def gpt_datasets(config: Config, vocabulary: TextVocabulary, sizes: Sizes) -> Datasets:
    """The three splits of a run that trains a GPT.

    Args:
        config: the run's configuration.
        vocabulary: what ids stand for.
        sizes: the least samples of train, valid and test.

    Raises:
        DataError: files are missing or damaged, or hold too little for one sample.
    """
    data, eod, packed = config.data, vocabulary.eod, config.data.pack == "best-fit"
    if packed and eod is None and not data.eod_mask_loss:
        eod = _NO_TOKEN  # a packing knows where documents begin, so that no token has to say it
    settings = GPTSettings(
        sequence_length=config.model.seq_length,
        seed=config.training.seed,
        cache_dir=_cache_of(data),
        vocab_size=vocabulary.size,
        ends=DocumentEnds(eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss),
    )
    return build_datasets(_request(config, GPTBuilder(settings, packed, _prepared(data)), sizes))


def _prepared(data: DataConfig) -> tuple[str, str, str] | None:
    document, sample, shuffle = (
        data.train_doc_idx_path,
        data.train_sample_idx_path,
        data.train_shuffle_idx_path,
    )
    return (document, sample, shuffle) if document and sample and shuffle else None


def bert_datasets(config: Config, vocabulary: TextVocabulary, sizes: Sizes) -> Datasets:
    """The three splits of a run that trains a BERT; arguments and errors as in `gpt_datasets`.

    Raises:
        DataError: besides, the vocabulary is no WordPiece or lacks a special token, or the documents are not
            split into sentences.
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
        DataError: besides, the vocabulary lacks a special token, or has fewer sentinels than spans may need.
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
        return pair_datasets(config, settings, tokenizer, sizes)
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
    )


def _cache_of(data: DataConfig) -> str | None:
    return data.data_cache_path or default_cache(expanded(data.data_path or data.train_data_path, "train"))


def _train_size(data: DataConfig, wanted: int | None, *, by_metric: bool) -> int | None:
    """The number of samples to build for training: one epoch (None) for a cyclic order or a curriculum.

    An epoch is then the data, whatever the batch size and the length of the training. A weighted blend, which
    gives what its weights say, has no epoch; and Megatron's own order is over what Megatron builds.
    """
    endless = data.dataloader_type == "cyclic" or by_metric
    if not wanted or not endless or data.data_sharding:
        return wanted
    source = expanded(data.train_data_path or data.data_path, "train")
    weighted = bool(source) and parse_blend(source, must_exist=False)[0][0] is not None
    return wanted if weighted else None


def default_cache(paths: tuple[str, ...]) -> str | None:
    """The default cache: beside the first dataset, where Megatron-DeepSpeed keeps its indexes too."""
    if not paths:
        return None
    _, prefix = parse_blend(paths, must_exist=False)[0]
    return str(Path(prefix).parent / "index-cache")


@dataclass(frozen=True)
class _Portion:
    """One dataset's part in one split: its units, those that were divided, its weight, and its mentions."""

    indexed: IndexedDataset
    units: range
    divided: int
    weight: float | None
    mentions: int = 1

    def with_another(self, weight: float | None) -> _Portion:
        """The same part, named once more.

        Two entries would give the same samples in the same order, side by side in each batch.
        """
        total = None if self.weight is None or weight is None else self.weight + weight
        return replace(self, weight=total, mentions=self.mentions + 1)


def _build_split(
    request: DatasetRequest, number: int, opened: dict[str, IndexedDataset]
) -> SampleDataset | None:
    size, name = request.num_samples[number], SPLIT_NAMES[number]
    epochs = request.train_exact_num_epochs if number == 0 else None
    given, builder = request.sources, request.builder
    own = given.own_paths[number]
    if size == 0 or not (own or given.data_path):
        return None
    portions: dict[tuple[str, str, range], _Portion] = {}
    for weight, name_of_part in parse_blend(own or given.data_path):
        prefix = prefix_of(name_of_part)
        if prefix not in opened:
            opened[prefix] = open_indexed(prefix, guarded=request.guarded)
        indexed = opened[prefix]
        whole = ids = part_of(name_of_part, builder.units(indexed))
        if not own:
            share = split_ranges(given.split, len(whole), given.split_reading)[number]
            ids = whole[share.start : share.stop]
        key = realpath(f"{prefix}.idx"), realpath(f"{prefix}.bin"), ids
        known = portions.get(key)
        new = _Portion(indexed, ids, len(whole), weight) if known is None else known.with_another(weight)
        portions[key] = new
    sources = list(portions.values())
    if not any(len(source.units) for source in sources):
        amount = f"{sum(source.divided for source in sources)} {builder.unit}"
        warn_of_empty(given.split, number, amount, given=bool(own))
        return None
    for source in sources:
        if not len(source.units):
            how = f"split {given.split} gives it none of {source.divided}; give {name}_data_path or a "
            if own:
                how = f"{name}_data_path gives it none of {builder.units(source.indexed)}; give a "
            raise DataError(
                f"`{name}` split of {source.indexed.prefix} must have some of its {builder.unit}, but {how}"
                "larger share."
            )
    return _assemble(builder, sources, size, name, epochs)


def _assemble(
    builder: DatasetBuilder, sources: list[_Portion], size: int | None, name: str, epochs: int | None
) -> SampleDataset:
    mentions = [source.mentions for source in sources]
    if mentions == [1] and sources[0].weight is None:
        (source,) = sources
        return builder.build(source.indexed, source.units, size, name, epochs)
    weighted = sources[0].weight is not None
    if not weighted or epochs is not None:
        if weighted:
            raise DataError(
                f"`train_exact_num_epochs` must come without weights in `data_path`, but is {epochs}; the "
                "number of epochs already fixes how much each dataset gives."
            )
        parts = [
            builder.build(
                s.indexed, s.units, None, name, s.mentions * (epochs or 1) if s.mentions > 1 else epochs
            )
            for s in sources
        ]
        total = sum(len(part) for part in parts)
        blend_size = None if size is None or epochs is not None else min(size, total)
        return BlendedDataset(parts, None, blend_size, builder.cache_dir, name, mentions)
    if size is None:
        raise DataError(f"`num_samples` must be given for the weighted {name} blend, but is None.")
    weights = normalized([source.weight for source in sources if source.weight is not None]).tolist()
    targets = [math.ceil(size * weight) for weight in weights]
    parts = [
        builder.build(s.indexed, s.units, math.ceil(target * (1 + _RESERVE)), name, None)
        for s, target in zip(sources, targets, strict=True)
    ]
    return BlendedDataset(parts, weights, sum(targets), builder.cache_dir, name, mentions)
