"""The GPT datasets of `megazero.data.build`: documents laid end to end, or packed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megazero.data.gpt_dataset import GPTDataset, GPTSettings, MockGPTDataset
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.packed.dataset import PackedDataset
from megazero.data.splits import SPLIT_NAMES


@dataclass(frozen=True)
class GPTBuilder:
    """Makes GPT datasets of these settings, for `megazero.data.build`. Splits divide sequences.

    pack: samples are made of whole documents, by best-fit packing. prepared: .npy files with the training's
    order of documents, begins of samples and order of samples; None to build them.
    """

    settings: GPTSettings
    pack: bool = False
    prepared: tuple[str, str, str] | None = None

    unit = "sequences"

    @property
    def cache_dir(self) -> str | Path | None:
        return self.settings.cache_dir

    def units(self, indexed: IndexedDataset) -> int:
        return len(indexed)

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> GPTDataset | PackedDataset:
        if self.prepared is not None and name == SPLIT_NAMES[0]:
            return GPTDataset(indexed, units, num_samples, self.settings, name, epochs, self.prepared)
        kind = PackedDataset if self.pack else GPTDataset
        return kind(indexed, units, num_samples, self.settings, name, epochs)

    def mock(self, num_samples: int, name: str) -> MockGPTDataset:
        return MockGPTDataset(num_samples, self.settings, name)
