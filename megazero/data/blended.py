"""Mixing datasets in given proportions, exactly.

The rule is Megatron's: sample i comes from the dataset that lags furthest behind its share, so the realized
ratio is right at every moment of training and not only on average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megazero.config.compat.blends import prefix_of
from megazero.config.words import is_number
from megazero.data.build_report import BuildReport
from megazero.data.cache import cached_arrays
from megazero.data.index_build import build_blending_index, build_exhaustive_blending_index, normalized
from megazero.data.index_check import blend_index_fault
from megazero.data.sample_numbers import sample_numbers
from megazero.errors import DataError

_INDEX_ARRAYS = ("dataset_index", "sample_index")
# About what each sample of an index takes on one busy core, and each dataset that it may be of.
_SAMPLE_SECONDS, _CHOICE_SECONDS = 40e-9, 3e-9


class SampleDataset(Protocol):
    """Numbered samples: a blend is made of such datasets, and is one itself."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index` of the shuffled order: the arrays of `batch`, without their first dim."""
        return {key: array[0] for key, array in self.batch([index]).items()}

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]: ...

    @property
    def description(self) -> dict[str, object]: ...

    @property
    def padding_share(self) -> float: ...  # of all positions, those that hold no token

    @property
    def notes(self) -> tuple[str, ...]: ...  # what a user should hear at the start, in whole sentences


def whereabouts(dataset: SampleDataset, number: int) -> str:
    """The place of a sample's text in the files, for people; empty if it is in none."""
    find: Callable[[int], str] | None = getattr(dataset, "whereabouts", None)
    return "" if find is None else find(number)


def parse_blend(entries: Sequence[str], must_exist: bool = True) -> list[tuple[float | None, str]]:
    """(weight, prefix) of each dataset of a `--data-path`.

    A single prefix, or prefixes without any weights, have weight None (a blend in proportion to sizes);
    otherwise the form is "weight prefix weight prefix ...". must_exist: `prefix.idx` and `.bin` must exist.
    A dataset of weight 0 is left out. Raises DataError for anything else and for weights below 0.
    """
    entries = [str(entry) for entry in entries]
    if not entries:
        raise DataError("`data_path` must name at least one dataset, but is empty; give its prefix.")
    if not any(_is_weight(entry) for entry in entries):
        pairs: list[tuple[float | None, str]] = [(None, entry) for entry in entries]
    elif len(entries) % 2:
        raise DataError(
            f"`data_path` must be pairs of weight and prefix, but has {len(entries)} entries "
            f"({' '.join(entries)}); give every prefix a weight."
        )
    else:
        weighted = [(_weight(w), p) for w, p in zip(entries[::2], entries[1::2], strict=True)]
        pairs = [(weight, prefix) for weight, prefix in weighted if weight]
        if not pairs:
            raise DataError("`data_path` must give some dataset a weight above 0, but gives none; raise one.")
    if must_exist:
        for _, prefix in pairs:
            for suffix in (".idx", ".bin"):
                if not Path(prefix_of(prefix) + suffix).is_file():
                    raise DataError(
                        f"`data_path` must name datasets, but {prefix}{suffix} is not a file; give the path "
                        "without .idx or .bin."
                    )
    return pairs


def _is_weight(text: str) -> bool:
    return is_number(text) and not Path(text + ".idx").exists()  # a dataset may be called "2024"


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        raise DataError(f"`weight` in `data_path` must be a number of at least 0, but is {text!r}; give one.")
    return weight


class BlendedDataset(SampleDataset):
    """A mixture of datasets; its items are theirs plus `dataset_id` (int64).

    weights: one positive number for each, normalized here, or None to mix in proportion to sizes; size: the
    number of samples, or None (only without weights) for every sample of every dataset exactly once;
    mentions: how often each dataset was named, once by default. Raises DataError if a dataset would have to
    give more samples than it has.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        weights: Sequence[float] | None,
        size: int | None,
        cache_dir: str | Path | None = None,
        name: str = "train",
        mentions: Sequence[int] | None = None,
    ):
        if weights is not None and len(weights) != len(datasets):
            raise DataError(
                f"`weights` must be one for each of {len(datasets)} datasets, but are {len(weights)}."
            )
        if weights is not None and size is None:
            raise DataError("`size` must be given for a weighted blend, but is None; say how many samples.")
        self.datasets = list(datasets)
        self.name = name
        self.mentions = mentions or [1] * len(datasets)
        self._sizes = [len(dataset) for dataset in self.datasets]
        # None: every sample once. Otherwise shares, by weight or by size.
        self._shares = None if size is None else normalized(self._sizes if weights is None else weights)
        self._size = sum(self._sizes) if size is None else size
        description = {} if cache_dir is None else self.description
        arrays = cached_arrays(
            cache_dir, f"blend-{name}", description, _INDEX_ARRAYS, self._build, self._fault
        )
        self.dataset_index: np.ndarray = arrays["dataset_index"]
        self.sample_index: np.ndarray = arrays["sample_index"]
        self._taken = np.bincount(self.dataset_index, minlength=len(self.datasets))
        self._check_sizes()

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked, arrays [b, T] and `dataset_id` [b]. IndexError past the end."""
        indices = sample_numbers(indices, len(self), f"the {self.name} blend")
        owners = self.dataset_index[indices].astype(np.int64)
        samples = self.sample_index[indices]
        merged: dict[str, np.ndarray] = {}
        for owner in np.unique(owners):
            rows = np.flatnonzero(owners == owner)
            for key, part in self.datasets[owner].batch(samples[rows]).items():
                if key not in merged:
                    merged[key] = np.empty((len(indices), *part.shape[1:]), dtype=part.dtype)
                merged[key][rows] = part
        return {**merged, "dataset_id": owners}

    def whereabouts(self, number: int) -> str:
        """The place of a sample's text, as its dataset says."""
        return whereabouts(self.datasets[self.dataset_index[number]], int(self.sample_index[number]))

    @property
    def description(self) -> dict[str, object]:
        return {
            "kind": "blend",
            "datasets": [dataset.description for dataset in self.datasets],
            "shares": None if self._shares is None else [float(share) for share in self._shares],
            "size": self._size,
        }

    @property
    def padding_share(self) -> float:
        """Share of the positions that hold no token, by how often each dataset is drawn from."""
        return float(np.dot(self._taken, [dataset.padding_share for dataset in self.datasets]) / self._size)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all datasets, and those that were named several times."""
        merged = [
            f"{getattr(getattr(dataset, 'indexed', None), 'prefix', dataset.name)} is named {times} times in "
            "a blend: it is one dataset there, with the sum of its weights."
            for dataset, times in zip(self.datasets, self.mentions, strict=True)
            if times > 1
        ]
        return (*merged, *(note for dataset in self.datasets for note in dataset.notes))

    def _build(self) -> dict[str, np.ndarray]:
        seconds = self._size * (_SAMPLE_SECONDS + len(self._sizes) * _CHOICE_SECONDS)
        with BuildReport(f"index of the {self.name} blend", self._size, seconds):
            if self._shares is None:
                owners, samples = build_exhaustive_blending_index(np.array(self._sizes))
            else:
                owners, samples = build_blending_index(self._shares, self._size)
        return {"dataset_index": owners, "sample_index": samples}

    def _fault(self, arrays: Mapping[str, np.ndarray]) -> str | None:
        owners, samples = arrays["dataset_index"], arrays["sample_index"]
        return blend_index_fault(owners, samples, self._sizes, self._shares, self._size)

    def _check_sizes(self) -> None:
        for number, (asked, given) in enumerate(zip(self._taken.tolist(), self._sizes, strict=True)):
            if asked > given:
                raise DataError(
                    f"`samples` of dataset {number} of the {self.name} blend must be at least {asked}, but "
                    f"are {given}; ask it for more samples or lower its weight."
                )
