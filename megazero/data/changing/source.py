"""`Source`: all samples of one source of a blend, in an order of its own that never ends."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from megazero.data.blended import SampleDataset, gather_parts, whereabouts
from megazero.data.changing.history import Share

Make = Callable[[str, int, str | None], SampleDataset]
"""(path, samples, key) -> at least so many samples of one source, in the run's order or in that of a key."""

_OPEN = 8  # parts that stay open


class Source(SampleDataset):
    """The samples planned for, then epoch after epoch, each built when it is first needed.

    planned: the number of samples planned for; 0 for a source that came later. first: their dataset, if there
    is one already.
    """

    def __init__(self, share: Share, planned: int, make: Make, first: SampleDataset | None = None):
        self.name, self.path = share.source, share.path
        self._planned, self._make = planned, make
        self._parts = {} if first is None else {0: first}
        self._ends = [0] if first is None else [0, len(first)]
        self._lock = threading.Lock()  # the batches of a step and those read ahead may ask at once

    def __len__(self) -> int:
        return self._ends[-1]  # as far as it is known

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked."""
        indices = np.asarray(indices, dtype=np.int64)
        part = bisect_right(self._ends, int(indices.min())) - 1
        if part + 1 < len(self._ends) and int(indices.max()) < self._ends[part + 1]:
            return self._part(part).batch(indices - self._ends[part])  # as nearly always
        return gather_parts(self._part, *self.located(indices))

    def located(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part in which each sample lies, and its number there; int64 [b] each."""
        with self._lock:
            while self._ends[-1] <= int(samples.max()):
                self._ends.append(self._ends[-1] + len(self._built(len(self._ends) - 1)))
        ends = np.array(self._ends)
        parts = np.searchsorted(ends, samples, side="right") - 1
        return parts, samples - ends[parts]

    def whereabouts(self, number: int) -> str:
        """Where the text of a sample lies."""
        parts, samples = self.located(np.array([number]))
        return whereabouts(self._part(int(parts[0])), int(samples[0]))

    @property
    def datasets(self) -> list[SampleDataset]:
        """The parts that are open."""
        return list(self._parts.values())

    @property
    def description(self) -> dict[str, object]:
        return {"kind": "source", "parts": {str(n): part.description for n, part in self._parts.items()}}

    @property
    def padding_share(self) -> float:
        return self.datasets[-1].padding_share

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for part in self.datasets for note in part.notes)

    def _part(self, number: int) -> SampleDataset:
        return self._parts.get(number) or self._built(number)

    def _built(self, number: int) -> SampleDataset:
        if number == 0 and self._planned:
            part = self._make(self.path, self._planned, None)
        else:  # an epoch, or as many as give a sample
            part = self._make(self.path, 1, f"{self.name} {number}")
        # Earlier ones were read to their end; a training that goes back opens them again.
        self._parts = {**{n: p for n, p in self._parts.items() if n > number - _OPEN}, number: part}
        return part
