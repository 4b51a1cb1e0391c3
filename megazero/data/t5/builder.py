"""The builder of the splits of a T5 run, for `megazero.data.build`, and those of files of pairs."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.tree.config import Config
from megazero.data.bert.builder import BERTBuilder
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.splits import SPLIT_NAMES, SplitReading, split_ranges, warn_of_empty
from megazero.data.t5.dataset import T5Dataset, T5Settings
from megazero.data.t5.mock import MockT5Dataset
from megazero.data.t5.pairs import Pair, PairDataset, read_pairs
from megazero.data.tokenizers.base import Tokenizer
from megazero.errors import DataError


@dataclass(frozen=True)
class T5Builder(BERTBuilder):
    """Makes T5 datasets of these settings. Splits divide documents, so that none lies in two of them."""

    settings: T5Settings

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> T5Dataset:
        return T5Dataset(indexed, units, num_samples, self.settings, name, epochs)

    def mock(self, num_samples: int, name: str) -> MockT5Dataset:
        return MockT5Dataset(num_samples, self.settings, name)


def pair_datasets(
    config: Config, settings: T5Settings, tokenizer: Tokenizer | None, sizes: tuple[int | None, ...]
) -> tuple[PairDataset | None, PairDataset | None, PairDataset | None]:
    """The splits of a run on files of pairs: those of the training are shuffled anew in every epoch.

    A wanted split that gets no pairs is None, of which a warning tells.

    Raises:
        DataError: a file is missing or holds no pairs, or there is no tokenizer.
    """
    data, columns = config.data, config.data.t5_columns
    assert columns is not None, "called for files of pairs"
    if tokenizer is None:
        raise DataError("`--tokenizer-type` must be given to read texts, but is not; name the tokenizer.")
    own = (data.train_data_path, data.valid_data_path, data.test_data_path)

    def pairs_of(paths: tuple[str, ...]) -> list[Pair]:
        return [
            pair for path in paths for pair in read_pairs(path, columns, tokenizer, settings.vocabulary.end)
        ]

    if any(own):
        splits = [pairs_of(paths) for paths in own]
    else:
        whole = pairs_of(data.data_path)
        ranges = split_ranges(data.split, len(whole), SplitReading.MEGATRON_CORE)
        splits = [whole[part.start : part.stop] for part in ranges]
        for number, (pairs, size) in enumerate(zip(splits, sizes, strict=True)):
            if not pairs and size != 0:
                warn_of_empty(data.split, number, f"{len(whole)} pairs")
    train, valid, test = (
        PairDataset(pairs, size, settings.shape, settings.vocabulary, None if number else settings.seed, name)
        if pairs and size != 0
        else None
        for number, (pairs, size, name) in enumerate(zip(splits, sizes, SPLIT_NAMES, strict=True))
    )
    return train, valid, test
