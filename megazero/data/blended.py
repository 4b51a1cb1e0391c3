"""Mixing datasets in given proportions, exactly.

The rule is Megatron's: sample i comes from the dataset that lags furthest behind its share, so the ratios are
right at every point of the training, not only on average.
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
from megazero.data.range_checks import check_sample_numbers
from megazero.errors import DataError
from megazero.storage.urls import Url, is_url

_INDEX_ARRAYS = ("dataset_index", "sample_index")
# To build an index: seconds per sample, and per sample and dataset, measured on one busy core.
_SAMPLE_SECONDS, _CHOICE_SECONDS = 40e-9, 3e-9


class SampleDataset(Protocol):
    """Numbered samples. A blend is made of such datasets, and is one itself."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`: the arrays of `batch` without their first dim."""
        return {key: array[0] for key, array in self.batch([index]).items()}

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]: ...

    @property
    def description(self) -> dict[str, object]: ...

    @property
    def padding_share(self) -> float: ...  # the share of all positions that hold no token

    @property
    def notes(self) -> tuple[str, ...]: ...  # sentences for the user at the start of a run


def whereabouts(dataset: SampleDataset, number: int) -> str:
    """Where the text of a sample lies in the files, for messages; empty for mock data."""
    find: Callable[[int], str] | None = getattr(dataset, "whereabouts", None)
    return "" if find is None else find(number)


def gather_parts(
    part: Callable[[int], SampleDataset], owners: np.ndarray, samples: np.ndarray
) -> dict[str, np.ndarray]:
    """Stack samples of several datasets: number `samples[i]` of `part(owners[i])`, int64 [b] each."""
    merged: dict[str, np.ndarray] = {}
    for owner in np.unique(owners).tolist():
        rows = np.flatnonzero(owners == owner)
        for key, array in part(owner).batch(samples[rows]).items():
            if key not in merged:
                merged[key] = np.empty((len(owners), *array.shape[1:]), dtype=array.dtype)
            merged[key][rows] = array
    return merged


def parse_blend(entries: Sequence[str], must_exist: bool = True) -> list[tuple[float | None, str]]:
    """Parse a `--data-path` into (weight, prefix) of each dataset.

    The entries are prefixes without weights (the weights are None: a blend in proportion to sizes), or
    "weight prefix weight prefix ..."; a dataset of weight 0 is left out. must_exist: `prefix.idx` and `.bin`
    must exist. Raises DataError for other forms and for weights below 0.
    """
    entries = [str(entry) for entry in entries]
    if not entries:
        raise DataError("`data_path` must name at least one dataset, but is empty; give its prefix.")
    # A dataset may have the name "2024".
    if not any(is_number(entry) and not Path(entry + ".idx").exists() for entry in entries):
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
            if is_url(prefix):  # opening it will tell
                Url.parse(prefix_of(prefix))
                continue
            for suffix in (".idx", ".bin"):
                if not Path(prefix_of(prefix) + suffix).is_file():
                    raise DataError(
                        f"`data_path` must name datasets, but {prefix}{suffix} is not a file; give the path "
                        "without .idx or .bin."
                    )
    return pairs


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        raise DataError(f"`weight` in `data_path` must be a number of at least 0, but is {text!r}; give one.")
    return weight


class BlendedDataset(SampleDataset):
    """A mixture of datasets. Samples have the arrays of their dataset, and `dataset_id` (int64).

    weights: a positive number for each dataset, normalized here; None to mix in proportion to sizes. size:
    the number of samples; None (only without weights) for every sample of every dataset exactly once.
    mentions: how often the data path names each dataset; once by default. Raises DataError if a dataset would
    have to give more samples than it has.
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
        # The share of each dataset; None if every sample is given once.
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
        indices = check_sample_numbers(indices, len(self), f"the {self.name} blend")
        owners = self.dataset_index[indices].astype(np.int64)
        merged = gather_parts(self.datasets.__getitem__, owners, self.sample_index[indices])
        return {**merged, "dataset_id": owners}

    def whereabouts(self, number: int) -> str:
        """Where the text of a sample lies, by its dataset."""
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
        """Share of the positions that hold no token: the mean over datasets by their number of samples."""
        return float(np.dot(self._taken, [dataset.padding_share for dataset in self.datasets]) / self._size)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all datasets, and a note for each dataset that was named several times."""
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
        for number, (needed, size) in enumerate(zip(self._taken.tolist(), self._sizes, strict=True)):
            if needed > size:
                raise DataError(
                    f"`samples` of dataset {number} of the {self.name} blend must be at least {needed}, but "
                    f"are {size}; ask it for more samples or lower its weight."
                )
