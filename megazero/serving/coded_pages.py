"""Pages of keys and values in codes of 8 bits (see `inference.coded`); a page is a block of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megazero.inference.coded import decoded, encoded
from megazero.serving.page_buffers import PANEL, Kept, PageBuffers, Ragged, on_device


class CodedPages(PageBuffers):
    """The pages of all layers: full ones in codes, those that are being filled as they are.

    A row attends to earlier pages by their codes, and to its own page as it is. A step decodes the pages that
    its rows read, one layer at a time.

    Args:
        pages: how many there are.
        page: positions of each.
    """

    def __init__(self, pages: int, page: int):
        super().__init__(pages, page)
        self._codes: dict[int, tuple[Tensor, ...]] = {}  # and scales, of keys and of values
        self._open: dict[int, int] = {}  # page -> its place in the tensors of `_kept`
        self._spare: list[int] = []
        self._step: _PagedRows | None = None

    @property
    def bytes(self) -> int:
        """The bytes that are in memory."""
        return super().bytes + sum(x.nbytes for tensors in self._codes.values() for x in tensors)

    def forget(self, table: Sequence[int]) -> None:
        """Let go of what pages hold as it is."""
        self._spare += [self._open.pop(page) for page in table if page in self._open]

    def filled(
        self, layer: int, ragged: Ragged, slots: Tensor, key: Tensor, value: Tensor
    ) -> tuple[PageBuffers, Ragged]:
        """Keep the rows of a step; return the pages that they attend to, decoded, and each page's rows."""
        if self._step is None or self._step.ragged is not ragged:
            self._step = self._begun(ragged)
        step = self._step
        kept, codes = self._reserve(layer, 1 + max(step.places), key, value)
        places, of_rows, pages, chosen, earlier = step.numbers
        self.write(layer, of_rows * self.page + slots % self.page, key, value)
        if step.full:
            coded = *encoded(kept.keys[chosen], 2, 4), *encoded(kept.values[chosen], 3)
            for x, new in zip(codes, coded, strict=True):
                x[pages] = new
        both = (decoded(codes[i][earlier], codes[i + 1][earlier], kept.keys.dtype) for i in (0, 2))
        own = kept.keys[places], kept.values[places]
        keys, values = (torch.cat(parts) for parts in zip(both, own, strict=True))
        read = PageBuffers(len(keys), self.page)
        read._kept[layer] = replace(kept, keys=keys, values=values)
        return read, step.runs

    def _begun(self, ragged: Ragged) -> _PagedRows:
        """Cut a step into runs of rows in one page each, and find a place for each page that is written."""
        if self._step is not None:
            self.forget([page for page, _ in self._step.full])
        counts, past, tables, places, full = [], [], [], [], []
        for count, start, table in zip(ragged.counts, ragged.past, ragged.tables, strict=True):
            at, end = start, start + count
            while at < end:
                number = at // self.page
                stop, page = min(end, (number + 1) * self.page), table[number]
                if page not in self._open:
                    self._open[page] = self._spare.pop() if self._spare else len(self._open)
                places.append(self._open[page])
                if stop % self.page == 0:
                    full.append((page, places[-1]))
                counts.append(stop - at)
                past.append(at)
                tables.append(table[:number])
                at = stop
        earlier = tuple(dict.fromkeys(page for table in tables for page in table))
        numbers = {page: number for number, page in enumerate(earlier)}
        within = [(*map(numbers.__getitem__, table), len(earlier) + run) for run, table in enumerate(tables)]
        runs = Ragged(tuple(counts), tuple(past), tuple(within), ragged.device)
        return _PagedRows(ragged, runs, tuple(places), tuple(full), earlier)

    @torch.inference_mode(False)
    def _reserve(self, layer: int, count: int, key: Tensor, value: Tensor) -> tuple[Kept, tuple[Tensor, ...]]:
        """A layer's tensors, with room for `count` pages as they are."""
        kept = self._kept.get(layer)
        if kept is None or len(kept.keys) < count:
            more = Kept.made(count, self.page, key, value)
            if kept is None:
                (g, panels, d, _), shape = more.keys.shape[1:], more.values.shape[1:]
                self._codes[layer] = (
                    key.new_zeros(self.pages, g, panels, d, PANEL, dtype=torch.int8),
                    key.new_zeros(self.pages, g, 1, d, 1, dtype=torch.float32),
                    value.new_zeros(self.pages, *shape, dtype=torch.int8),
                    value.new_zeros(self.pages, *shape[:2], 1, dtype=torch.float32),
                )
            else:
                more.keys[: len(kept.keys)], more.values[: len(kept.values)] = kept.keys, kept.values
            self._kept[layer] = kept = more
        return kept, self._codes[layer]


@dataclass(frozen=True)
class _PagedRows:
    """A step's rows by pages.

    Attributes:
        ragged: the rows by sequences.
        runs: the same in runs, each in one page; pages are numbered as they are decoded: those of `earlier`,
            then one for each run.
        places: where the page of each run is kept as it is.
        full: page and place of those that the step fills.
        earlier: the pages that are read by their codes.
    """

    ragged: Ragged
    runs: Ragged
    places: tuple[int, ...]
    full: tuple[tuple[int, int], ...]
    earlier: tuple[int, ...]

    @cached_property
    def numbers(self) -> tuple[Tensor, ...]:
        """On the device, int64: `places`, that of each row, pages and places of `full`, and `earlier`."""
        runs = zip(self.places, self.runs.counts, strict=True)
        of_rows = [place for place, count in runs for _ in range(count)]
        full = [page for page, _ in self.full], [place for _, place in self.full]
        return on_device(self.ragged.device, self.places, of_rows, *full, self.earlier)
