"""The builder of the splits of a BERT run, for `megazero.data.build`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megazero.data.bert.dataset import BERTDataset, BERTSettings
from megazero.data.bert.mock import MockBERTDataset
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.splits import SPLIT_NAMES


@dataclass(frozen=True)
class BERTBuilder:
    """Makes BERT datasets of these settings. Splits divide documents, so that none lies in two of them.

    prepared: a .npy file with the map of the training's samples; None for one that is built.
    """

    settings: BERTSettings
    prepared: str | None = None

    unit = "documents"

    @property
    def cache_dir(self) -> str | Path | None:
        return self.settings.cache_dir

    def units(self, indexed: IndexedDataset) -> int:
        return indexed.document_index.size - 1

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> BERTDataset:
        prepared = self.prepared if name == SPLIT_NAMES[0] else None
        return BERTDataset(indexed, units, num_samples, self.settings, name, epochs, prepared)

    def mock(self, num_samples: int, name: str) -> MockBERTDataset:
        return MockBERTDataset(num_samples, self.settings, name)
