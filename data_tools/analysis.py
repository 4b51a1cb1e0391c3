"""The parts of `analyze_dataset.py`: the samples and the metrics that its flags choose, and its reports."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools import cli
from megazero.data.bert.dataset import BERTSettings
from megazero.data.bert.word_pieces import WordPieces
from megazero.data.blended import SampleDataset
from megazero.data.build import DatasetBuilder, DatasetRequest, DataSources, build_datasets, default_cache
from megazero.data.from_config import BERTBuilder, GPTBuilder
from megazero.data.gpt_dataset import GPTSettings
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import build_tokenizer
from megazero.data_efficiency.analyzed import AnalyzedDataset, dataset_of
from megazero.data_efficiency.histogram import draw_sum, draw_values, percentiles
from megazero.data_efficiency.map import MetricFolder
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.metrics import (
    NEED_COUNTS,
    NEED_PADDING,
    SHIPPED,
    VOCABULARY_COUNTS,
    LengthThenRarity,
    RarityTable,
    SampleMetric,
    SequenceLength,
    VocabularyCounts,
    VocabularyRarity,
    read_counts,
)
from megazero.data_efficiency.row_file import RowFile
from megazero.data_efficiency.user_metric import UserMetric
from megazero.errors import DataError
from megazero.pictures.style import THEMES

_EVERY = 10.0  # seconds between lines where there is no terminal


@dataclass(frozen=True)
class TrainSplit:
    """The training samples of a run with these flags of `analyze_dataset.py`; calling the split opens them.

    A split can be pickled. Raises DataError if the flags contradict each other.
    """

    flags: argparse.Namespace

    def __post_init__(self) -> None:
        if self.flags.train_samples is not None and self.flags.train_data_exact_num_epochs is not None:
            raise DataError(
                "`--train-samples` must come without `--train-data-exact-num-epochs`, but both are given; "
                "each says how many samples there are, so give the one that the training gives."
            )

    def __call__(self) -> SampleDataset:
        """Build the split. Raises DataError if files are missing, damaged or too small, or it is empty."""
        flags = self.flags
        epochs = flags.train_data_exact_num_epochs or (1 if flags.train_samples is None else None)
        request = DatasetRequest(
            self._builder(),
            (flags.train_samples, 0, 0),
            DataSources(tuple(flags.data_path), flags.split),
            train_exact_num_epochs=epochs,
        )
        dataset = build_datasets(request)[0]
        if dataset is None:
            raise DataError(
                f"`--split` must give the train split some data, but {flags.split} gives it none of "
                f"{' '.join(flags.data_path)}; correct it."
            )
        return dataset

    def vocabulary_size(self) -> int:
        """The number of token ids. Raises DataError if no flag gives it."""
        flags = self.flags
        if flags.tokenizer_type is not None:
            return max(flags.vocab_size or 0, self._tokenizer().vocab_size)
        if flags.vocab_size is None:
            raise DataError(
                f"`--vocab-size` must be given to count ids for {VOCABULARY_COUNTS}, but is not; give it or "
                "a tokenizer."
            )
        size: int = flags.vocab_size
        return size

    def _tokenizer(self) -> Tokenizer:
        return build_tokenizer(cli.tokenizer_spec(self.flags))

    def _builder(self) -> DatasetBuilder:
        flags = self.flags
        cache = flags.data_cache_path or default_cache(tuple(flags.data_path))
        if flags.analyzing_data_type == "GPT":
            known = flags.tokenizer_type is not None or flags.vocab_size is not None
            size = self.vocabulary_size() if known else None
            return GPTBuilder(GPTSettings(flags.seq_length, flags.seed, cache, size))
        if flags.tokenizer_type is None:
            raise DataError(
                "`--tokenizer-type` must be given for BERT, whose samples contain special tokens, but is "
                "not; give the one of the training."
            )
        settings = BERTSettings(
            flags.seq_length,
            WordPieces.of(self._tokenizer()),
            flags.seed,
            cache,
            short_seq_prob=flags.short_seq_prob,
            binary_head=not flags.bert_no_binary_head,
        )
        return BERTBuilder(settings)


@dataclass(frozen=True)
class MetricChoice:
    """The metrics that the flags choose: shipped metrics by name, and users' own."""

    shipped: tuple[str, ...]
    own: tuple[UserMetric, ...]

    @classmethod
    def of(cls, args: argparse.Namespace) -> MetricChoice:
        """Read the flags. Raises DataError for an unknown metric, one named twice, or unfit for the data."""
        shipped = tuple(name for name in args.analyzing_metric if ":" not in name)
        own = [UserMetric(spec) for spec in args.analyzing_metric if ":" in spec]
        own += [UserMetric(spec, accumulates=True) for spec in args.accumulate]
        for name in shipped:
            if name == "loss":
                raise DataError(
                    "`--metric` must be computed from text alone, but `loss` needs a model; run "
                    "`megazero analyze-loss --output FOLDER` with the flags of the training."
                )
            if name not in SHIPPED:
                raise DataError(
                    f"`--metric` must be one of {', '.join(SHIPPED)}, or module:function or "
                    f"file.py:function, but is {name}; correct it."
                )
            if name in NEED_PADDING and args.analyzing_data_type == "GPT":
                raise DataError(
                    f"`--metric` {name} must have samples of different lengths, but those of GPT are all "
                    "full; use vocab_rarity, or cut samples short, which needs no analysis."
                )
        names = [*shipped, *(metric.name for metric in own)]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if not names or twice is not None:
            raise DataError(
                f"`--metric` must name at least one metric and none twice, but "
                f"{'names none' if twice is None else f'has {twice} twice'}; correct it."
            )
        return cls(shipped, tuple(own))

    @property
    def waves(self) -> Iterator[MetricChoice]:
        """Yield the metrics that need no other metric, then those that need the counts of the vocabulary."""
        first = tuple(name for name in self.shipped if name not in NEED_COUNTS)
        second = tuple(name for name in self.shipped if name in NEED_COUNTS)
        yield from (
            wave
            for wave in (MetricChoice(first, self.own), MetricChoice(second, ()))
            if wave.shipped or wave.own
        )

    def metrics(self, split: TrainSplit, save: Path, dataset: AnalyzedDataset) -> list[SampleMetric]:
        """Make the metrics. Raises DataError if counts are needed, but are missing or of other data."""
        metrics: list[SampleMetric] = list(self.own)
        table = _rarity_table(save, dataset) if NEED_COUNTS & set(self.shipped) else None
        for name in self.shipped:
            if name == "seqlen":
                metrics.append(SequenceLength())
            elif name == VOCABULARY_COUNTS:
                metrics.append(VocabularyCounts(split.vocabulary_size()))
            else:
                assert table is not None, f"{name} needs counts"
                by_length = name == "seqlen_vocab_rarity"
                metrics.append(
                    LengthThenRarity(table, split.flags.seq_length) if by_length else VocabularyRarity(table)
                )
        return metrics


def _rarity_table(save: Path, dataset: AnalyzedDataset) -> RarityTable:
    prefix = save / VOCABULARY_COUNTS / f"{VOCABULARY_COUNTS}_metric_value"
    if not Path(f"{prefix}.idx").exists():
        raise DataError(
            f"`{prefix}` must exist for {' and '.join(sorted(NEED_COUNTS))}, but does not; analyze "
            f"{VOCABULARY_COUNTS} into the same folder first (map and reduce), or name both metrics."
        )
    counted = dataset_of(prefix)
    if counted is not None:
        counted.check(dataset, str(prefix))
    return RarityTable.of(read_counts(prefix))


class Meter:
    """Shows the progress of a step: a bar on a terminal, else a line every few seconds."""

    def __init__(self, what: str, total: int):
        self._what, self._total, self._next = what, total, time.monotonic() + _EVERY
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            # auto_refresh would start a thread, and a process with threads cannot fork workers safely.
            self._bar = Progress(*columns, console=Console(file=sys.stderr), auto_refresh=False)
            self._task = self._bar.add_task(what, total=total)

    def show(self, done: int) -> None:
        """Show that `done` of the total is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, refresh=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            print(f"{self._what}: {done:,} of {self._total:,}", file=sys.stderr, flush=True)


@contextmanager
def metered(what: str, total: int) -> Iterator[Meter]:
    """Show a meter while the block runs."""
    meter = Meter(what, total)
    if meter._bar is not None:
        meter._bar.start()
    try:
        yield meter
    finally:
        if meter._bar is not None:
            meter._bar.stop()


def report(folder: MetricFolder, suffix: str | None, theme: str) -> None:
    """Print a summary of a metric's values; with a suffix, also draw them into a file of that format."""
    prefix = folder.results / folder.name
    picture = None if suffix is None else Path(f"{prefix}_histogram.{suffix}")
    if folder.accumulates:
        values = np.array(RowFile(f"{prefix}_metric_value").elements)
        print(f"{folder.name}: {values.size:,} numbers that add up to {sum(values.tolist()):,}")
        if picture is not None:
            draw_sum(values, folder.name, picture, THEMES[theme])
    else:
        index = MetricIndex.open(f"{prefix}_index_to_sample", f"{prefix}_index_to_metric")
        low, *middle, high = (f"{value:,}" for value in percentiles(index))
        print(
            f"{folder.name}: {len(index):,} samples, {index.values.size:,} distinct values; least {low}, "
            f"percentiles 5, 25, 50, 75, 95: {', '.join(middle)}; greatest {high}"
        )
        print(f'  "index_to_sample_path": "{prefix}_index_to_sample"')
        print(f'  "index_to_metric_path": "{prefix}_index_to_metric"')
        if picture is not None:
            draw_values(index, folder.name, picture, THEMES[theme])
    if picture is not None:
        print(f"  {picture}")
