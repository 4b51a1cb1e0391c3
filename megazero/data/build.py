"""Builds the train, validation and test datasets of a run.

Sizes and order follow Megatron-Core. A single prefix becomes one dataset. A weighted blend of N samples takes
ceil(N w) samples of each dataset, so it is Σ ceil(N w) samples long; each dataset is built half a percent
larger, as a reserve. Prefixes without weights give one epoch each, mixed in proportion to their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os.path import realpath
from typing import Protocol

from megazero.config.compat.blends import part_of, prefix_of
from megazero.data.bert.dataset import BERTSettings
from megazero.data.blended import BlendedDataset, SampleDataset, parse_blend
from megazero.data.gpt_dataset import GPTSettings
from megazero.data.index_build import normalized
from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.data.splits import SPLIT_NAMES, SplitReading, split_ranges, warn_of_empty
from megazero.errors import DataError
from megazero.storage.cached import Cache

_RESERVE = 0.005  # of the samples that a weighted blend takes of a dataset, the share built in addition
_MOCK_EPOCH = 100_000  # samples, the number of sequences of Megatron-Core's mock data

Datasets = tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]
Sizes = tuple[int | None, int | None, int | None]
"""The least number of samples of train, valid and test; 0 to leave a split out, None for one epoch."""


class DatasetBuilder(Protocol):
    """Builds the samples of one family of models; the rest of this module is the same for all families."""

    unit: str  # what a split string divides, as a plural: "sequences" or "documents"

    @property
    def settings(self) -> GPTSettings | BERTSettings: ...

    def units(self, indexed: IndexedDataset) -> int:
        """The number of units in an indexed dataset."""

    def build(
        self, indexed: IndexedDataset, units: range, num_samples: int | None, name: str, epochs: int | None
    ) -> SampleDataset:
        """Build the samples of `units`.

        num_samples: the least number of samples (None: one epoch); epochs: exactly this many epochs instead.
        """

    def mock(self, num_samples: int, name: str) -> SampleDataset:
        """Make random samples, for runs without data."""


@dataclass(frozen=True)
class DataSources:
    """The source of the data of the three splits, exactly one of three kinds.

    data_path: a prefix, several prefixes, or weights and prefixes, which `split` divides. train_data_path,
    valid_data_path, test_data_path: the same for each split by itself; `split` is not used. mock: random
    tokens, without files. Raises DataError for no source or more than one.
    """

    data_path: tuple[str, ...] = ()
    split: str = "969,30,1"
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    split_reading: SplitReading = SplitReading.MEGATRON_CORE
    mock: bool = False

    def __post_init__(self) -> None:
        kinds = {
            "data_path": bool(self.data_path),
            "mock": self.mock,
            "train_data_path/valid_data_path/test_data_path": any(self.own_paths),
        }
        chosen = [kind for kind, is_chosen in kinds.items() if is_chosen]
        if len(chosen) != 1:
            raise DataError(
                "`data source` must be exactly one of data_path, train/valid/test_data_path and mock, but is "
                f"{' and '.join(chosen) or 'none'}; give one."
            )

    @property
    def own_paths(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return self.train_data_path, self.valid_data_path, self.test_data_path


@dataclass(frozen=True)
class DatasetRequest:
    """Which datasets to build, and from which files.

    train_exact_num_epochs: the exact length of the training split, in epochs. guarded: notice damage to the
    files and changes while they are read, see `indexed/guard.py`. cache: where blocks of datasets at URLs are
    kept; None to copy these whole. blend: mixes datasets, with the arguments of `BlendedDataset`.
    """

    builder: DatasetBuilder
    num_samples: Sizes
    sources: DataSources
    train_exact_num_epochs: int | None = None
    guarded: bool = False
    cache: Cache | None = None
    blend: Callable[..., BlendedDataset] = BlendedDataset


def build_datasets(request: DatasetRequest) -> Datasets:
    """Return (train, valid, test), with None for a split that is empty or left out.

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


def default_cache(paths: tuple[str, ...], cache: Cache | None = None) -> str | None:
    """The default index cache: beside the first dataset, as in Megatron-DeepSpeed; None without paths.

    cache: where it is for a dataset at a URL.
    """
    if not paths:
        return None
    _, prefix = parse_blend(paths, must_exist=False)[0]
    return str((cache or Cache()).beside(prefix) / "index-cache")


@dataclass(frozen=True)
class _Portion:
    """The part of one dataset that goes into one split.

    units: the units of this split; total_units: those that the split string divided. mentions: how often the
    data path names the dataset.
    """

    indexed: IndexedDataset
    units: range
    total_units: int
    weight: float | None
    mentions: int = 1

    def mentioned_again(self, weight: float | None) -> _Portion:
        """The portion with the weight of another mention added.

        A second dataset would give the same samples in the same order, side by side in each batch.
        """
        total = None if self.weight is None or weight is None else self.weight + weight
        return replace(self, weight=total, mentions=self.mentions + 1)


def _build_split(
    request: DatasetRequest, number: int, opened: dict[str, IndexedDataset]
) -> SampleDataset | None:
    size, name = request.num_samples[number], SPLIT_NAMES[number]
    epochs = request.train_exact_num_epochs if number == 0 else None
    sources, builder = request.sources, request.builder
    own_path = sources.own_paths[number]
    if size == 0 or not (own_path or sources.data_path):
        return None
    portions = _portions(request, number, opened)
    if not any(len(portion.units) for portion in portions):
        amount = f"{sum(portion.total_units for portion in portions)} {builder.unit}"
        warn_of_empty(sources.split, number, amount, has_own_path=bool(own_path))
        return None
    for portion in portions:
        if not len(portion.units):
            how = f"split {sources.split} gives it none of {portion.total_units}; give {name}_data_path or a "
            if own_path:
                how = f"{name}_data_path gives it none of {builder.units(portion.indexed)}; give a "
            raise DataError(
                f"`{name}` split of {portion.indexed.prefix} must have some of its {builder.unit}, but {how}"
                "larger share."
            )
    if portions[0].weight is not None:
        return _weighted_blend(request, portions, size, name, epochs)
    return _unweighted(request, portions, size, name, epochs)


def _portions(request: DatasetRequest, number: int, opened: dict[str, IndexedDataset]) -> list[_Portion]:
    """One portion for each dataset, or part of one, that the path of split `number` names."""
    sources = request.sources
    own_path = sources.own_paths[number]
    portions: dict[tuple[str, str, range], _Portion] = {}
    for weight, entry in parse_blend(own_path or sources.data_path):
        prefix = prefix_of(entry)
        if prefix not in opened:
            opened[prefix] = open_indexed(prefix, guarded=request.guarded, cache=request.cache)
        indexed = opened[prefix]
        whole = units = part_of(entry, request.builder.units(indexed))
        if not own_path:
            share = split_ranges(sources.split, len(whole), sources.split_reading)[number]
            units = whole[share.start : share.stop]
        key = realpath(f"{prefix}.idx"), realpath(f"{prefix}.bin"), units
        if key in portions:
            portions[key] = portions[key].mentioned_again(weight)
        else:
            portions[key] = _Portion(indexed, units, len(whole), weight)
    return list(portions.values())


def _unweighted(
    request: DatasetRequest, portions: list[_Portion], size: int | None, name: str, epochs: int | None
) -> SampleDataset:
    builder, mentions = request.builder, [portion.mentions for portion in portions]
    if mentions == [1]:
        return builder.build(portions[0].indexed, portions[0].units, size, name, epochs)
    parts = [
        builder.build(
            p.indexed, p.units, None, name, p.mentions * (epochs or 1) if p.mentions > 1 else epochs
        )
        for p in portions
    ]
    total = sum(len(part) for part in parts)
    blend_size = None if size is None or epochs is not None else min(size, total)
    return request.blend(parts, None, blend_size, builder.settings.cache_dir, name, mentions)


def planned_samples(weights: Sequence[float], size: int) -> tuple[list[int], list[int]]:
    """The samples that a weighted blend of `size` takes of each dataset, and those that it builds."""
    targets = [math.ceil(size * weight) for weight in normalized(weights).tolist()]
    return targets, [math.ceil(target * (1 + _RESERVE)) for target in targets]


def _weighted_blend(
    request: DatasetRequest, portions: list[_Portion], size: int | None, name: str, epochs: int | None
) -> BlendedDataset:
    if epochs is not None:
        raise DataError(
            f"`train_exact_num_epochs` must come without weights in `data_path`, but is {epochs}; the "
            "number of epochs already fixes how much each dataset gives."
        )
    if size is None:
        raise DataError(f"`num_samples` must be given for the weighted {name} blend, but is None.")
    builder, weights = request.builder, [p.weight for p in portions if p.weight is not None]
    targets, planned = planned_samples(weights, size)
    weights = normalized(weights).tolist()
    parts = [
        builder.build(p.indexed, p.units, samples, name, None)
        for p, samples in zip(portions, planned, strict=True)
    ]
    mentions = [portion.mentions for portion in portions]
    return request.blend(parts, weights, sum(targets), builder.settings.cache_dir, name, mentions)
