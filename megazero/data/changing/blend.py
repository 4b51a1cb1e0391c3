"""`ChangingBlend`: a blend in segments, in which each source goes on where it stands.

Within a segment, sample i comes from the source that lags furthest behind its share since the segment began:
`BlendedDataset`'s rule from zero, with the samples that a source has given before added to its numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from megazero.data.blended import BlendedDataset, SampleDataset, gather_parts
from megazero.data.changing.history import History, Origin, Segment, Share
from megazero.data.changing.source import Make, Source
from megazero.data.index_build import build_blending_index, normalized
from megazero.data.range_checks import check_sample_numbers

_LEAST = 1 << 16  # samples of a segment whose sources are worked out at once


class Sources(Protocol):
    """Opens sources."""

    @property
    def make(self) -> Make: ...

    def shares(self, words: Sequence[str], known: Collection[str] = ()) -> tuple[Share, ...]:
        """The sources of a blend, given as the words of a data path, and their weights."""


class Mixture:
    """The source of each sample of a segment, worked out as far as it is asked for.

    numbers: source -> its number among all sources. first: the blend, if it has been built.
    """

    def __init__(self, segment: Segment, numbers: Mapping[str, int], first: BlendedDataset | None = None):
        self.segment, names = segment, [share.source for share in segment.shares]
        self._numbers = np.array([numbers[name] for name in names])
        self._taken = np.array([segment.taken.get(name, 0) for name in names])
        # Twice, as `BlendedDataset` gets them from `build_datasets`: ties depend on the last bit.
        self._shares = normalized(normalized([share.weight for share in segment.shares]))
        self._index = (np.empty(0, np.int16), np.empty(0, np.int64))
        if first is not None:
            self._index = (first.dataset_index, first.sample_index)

    def upto(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The arrays of `build_blending_index` for `count` samples or more."""
        index = self._index
        if len(index[0]) < count:
            self._index = index = build_blending_index(self._shares, max(count, 2 * len(index[0]), _LEAST))
        return index

    def located(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of each sample's source, and of the sample in it; int64 [b] each."""
        places = indices - self.segment.start
        chosen, since = (array[places] for array in self.upto(int(places.max()) + 1))
        return self._numbers[chosen], self._taken[chosen] + since

    def taken(self, sample: int) -> dict[str, int]:
        """The samples that each source has given before this one."""
        count = sample - self.segment.start
        given = np.bincount(self.upto(count)[0][:count], minlength=len(self.segment.shares)).tolist()
        here = {share.source: n for share, n in zip(self.segment.shares, given, strict=True)}
        return dict(Counter(self.segment.taken) + Counter(here))


class ChangingBlend(SampleDataset):
    """A training's blend, whose history `use` replaces while batches are read.

    library: opens its sources. size: the number of samples. position: the sample that the training is at;
    what is read from there on is opened. first: the first segment, if it has been built. words: the last
    blend as it was given.
    """

    name = "train"

    def __init__(
        self,
        history: History,
        library: Sources,
        size: int,
        position: int = 0,
        first: BlendedDataset | None = None,
        words: tuple[str, ...] = (),
    ):
        self.library, self._size, self._first = library, size, first
        numbers = {share.source: number for number, share in enumerate(history.segments[0].shares)}
        mixtures: tuple[Mixture, ...] = (Mixture(history.segments[0], numbers, first),)
        self._in_use: tuple[list[Source], tuple[Mixture, ...]] = [], mixtures
        self._sources: dict[str, Source] = {}
        for share, dataset in zip(history.segments[0].shares, first.datasets if first else (), strict=False):
            planned = history.planned[share.source]
            self._sources[share.source] = Source(share, planned, library.make, dataset)
        self.remarks: tuple[str, ...] = ()
        self.use(history, words)
        for segment in history.segments[len(history.until(position)) - 1 :]:
            self._open(segment, self.taken(max(position, segment.start)))

    def __len__(self) -> int:
        return self._size

    def use(self, history: History, words: tuple[str, ...]) -> None:
        """Go on by this history; batches that are being read keep to the one before."""
        for share in (share for segment in history.segments for share in segment.shares):
            source = Source(share, history.planned.get(share.source, 0), self.library.make)
            self._sources.setdefault(share.source, source).path = share.path
        # Numbers are by the first mention: they stay as they are in segments that stay.
        numbers = {name: number for number, name in enumerate(history.sources)}
        mixtures = tuple(
            next((m for m in self._in_use[1] if m.segment == segment), None) or Mixture(segment, numbers)
            for segment in history.segments
        )
        self._in_use = [self._sources[name] for name in history.sources], mixtures
        self.history, self.words = history, words

    def edited(self, shares: tuple[Share, ...], at: int, origin: Origin | None) -> History:
        """The history with these shares from sample `at` on. Raises DataError if one cannot be opened."""
        segment = Segment(start=at, shares=shares, taken=self.taken(at), origin=origin)
        self._open(segment, segment.taken)
        return self.history.changed(segment)

    def taken(self, sample: int) -> dict[str, int]:
        """The samples that each source has given before this one."""
        return [m for m in self._in_use[1] if m.segment.start <= sample][-1].taken(sample)

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked, with `dataset_id` [b], the number of the source."""
        indices = check_sample_numbers(indices, len(self), "the train blend")
        named, owners, samples = self.located(indices)
        return {**gather_parts(named.__getitem__, owners, samples), "dataset_id": owners}

    def located(self, indices: np.ndarray) -> tuple[list[Source], np.ndarray, np.ndarray]:
        """All sources, the number among them of each sample's source, and the sample's number in it."""
        sources, mixtures = self._in_use
        starts = [mixture.segment.start for mixture in mixtures]
        number = bisect_right(starts, int(indices.min())) - 1
        if number == len(starts) - 1 or int(indices.max()) < starts[number + 1]:
            return sources, *mixtures[number].located(indices)  # as nearly always
        within = np.searchsorted(starts, indices, side="right") - 1
        owners, samples = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
        for number in np.unique(within).tolist():
            rows = np.flatnonzero(within == number)
            owners[rows], samples[rows] = mixtures[number].located(indices[rows])
        return sources, owners, samples

    def whereabouts(self, number: int) -> str:
        """Where the text of a sample lies, by its source."""
        sources, owners, samples = self.located(np.array([number]))
        return sources[int(owners[0])].whereabouts(int(samples[0]))

    @property
    def datasets(self) -> list[Source]:
        """The sources of the last segment; the files of others may go."""
        return [self._sources[share.source] for share in self.history.segments[-1].shares]

    @property
    def mentions(self) -> Sequence[int] | None:
        """How often the data path names each source, while the blend is the first."""
        return None if self._first is None or len(self.history.segments) > 1 else self._first.mentions

    @property
    def description(self) -> dict[str, object]:
        facts = self.history.model_dump(exclude={"segments": {"__all__": {"origin", "shares"}}})
        shares = [segment.percent for segment in self.history.segments]
        datasets = [source.description for source in self.datasets]
        return {"kind": "changing blend", "datasets": datasets, "shares": shares, **facts}

    @property
    def padding_share(self) -> float:
        """Share of the positions that hold no token, in the last segment."""
        if self.mentions is not None and self._first is not None:
            return self._first.padding_share
        percent = self.history.segments[-1].percent
        return sum(percent[source.name] / 100 * source.padding_share for source in self.datasets)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the sources, and the last change."""
        of = self.datasets if self._first is None else [self._first]
        return (
            *(note for dataset in of for note in dataset.notes),
            *filter(None, [self.history.change]),
            *self.remarks,
        )

    def _open(self, segment: Segment, taken: dict[str, int]) -> None:
        for share in segment.shares:
            source = self._sources.setdefault(share.source, Source(share, 0, self.library.make))
            source.located(np.array([taken.get(share.source, 0)]))
