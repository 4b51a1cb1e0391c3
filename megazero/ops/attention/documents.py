"""`Documents`: which positions of a micro-batch belong to the same document, in the forms that kernels need.

Each form is computed at its first use and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megazero.host_memory import sent_to
from megazero.ops.scaled_softmax import may_attend, same_document

_WORTH = 1 << 14  # pairs of tokens: a call of the kernel takes about as long as this many under a mask


@dataclass(frozen=True)
class Runs:
    """Runs of equal ids, none of which comes back in its row, where rows lie one after another.

    Attributes:
        ends: int32 [runs + 1] on the documents' device: 0, and where each run ends.
        longest: the length of the longest.
    """

    ends: Tensor
    longest: int

    @classmethod
    def of(cls, ids: np.ndarray, device: torch.device) -> Runs | None:
        """The runs of ids [b, s], which the host knows; None if a document comes back after another one."""
        b, s = ids.shape
        if b * s == 0:
            return None
        first = np.ones((b, s), dtype=bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        row, _ = np.nonzero(first)
        if np.unique(np.stack((row, ids[first])), axis=1).shape[1] < len(row):
            return None
        ends = np.append(np.flatnonzero(first), b * s).astype(np.int32)
        return cls(sent_to(device, torch.from_numpy(ends)), int(np.diff(ends).max()))


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a micro-batch.

    Attributes:
        ids: int [b, t]; positions attend only within equal ids.
        runs: their runs, if known on the host when the ids were made.
        host: the ids on the host, if they were made there.
    """

    ids: Tensor
    runs: Runs | None = None
    host: np.ndarray | None = None

    @cached_property
    def mask(self) -> Tensor:
        """bool [b, 1, t, t], True where a position may attend to another."""
        return same_document(self.ids, self.ids.shape[1])

    @cached_property
    def causal_mask(self) -> Tensor:
        """bool [b, 1, t, t]: the mask, without later positions."""
        t = self.ids.shape[1]
        return self.mask & may_attend(t, t, self.ids.device)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """int32 [b, t] twice: where the document of each position begins, and where it ends.

        Ids may be in any order; equal beginnings mean equal documents. Nothing waits for the device.
        """
        b, t = self.ids.shape
        places = torch.arange(t, device=self.ids.device).expand(b, t)
        ordered, order = self.ids.sort(dim=1, stable=True)
        change = ordered[:, 1:] != ordered[:, :-1]
        edge = torch.ones(b, 1, dtype=torch.bool, device=self.ids.device)
        begins, ends = torch.cat((edge, change), 1), torch.cat((change, edge), 1)
        from_here = torch.where(begins, places, 0).cummax(1).values
        to_here = torch.where(ends, places, t - 1).flip(1).cummin(1).values.flip(1)
        first, stop = torch.empty_like(order), torch.empty_like(order)
        first.scatter_(1, order, order.gather(1, from_here))
        stop.scatter_(1, order, order.gather(1, to_here) + 1)
        return first.to(torch.int32), stop.to(torch.int32)

    @cached_property
    def run_numbers(self) -> Tensor:
        """int [b, t]: the number, in its row, of the run of equal ids that a position is in."""
        changes = (self.ids[:, 1:] != self.ids[:, :-1]).to(self.ids.dtype).cumsum(1)
        return torch.cat((torch.zeros_like(self.ids[:, :1]), changes), 1)

    def part(self, columns: range) -> Documents:
        """The documents of some columns; the same columns always give the same object, all columns give
        `self`.
        """
        if columns == range(self.ids.shape[1]):
            return self
        if columns not in self._parts:
            some = slice(columns.start, columns.stop)
            host = None if self.host is None else self.host[:, some]
            self._parts[columns] = Documents(self.ids[:, some], None, host)
        return self._parts[columns]

    @cached_property
    def _parts(self) -> dict[range, Documents]:
        return {}

    def hull(self, queries: range, keys: range) -> range:
        """The columns from the first to the last key of the documents of some queries, as far as the host
        knows.

        Cached, because all layers of a micro-batch ask for the same few.
        """
        if (queries, keys) not in self._hulls:
            self._hulls[queries, keys] = self._hull(queries, keys)
        return self._hulls[queries, keys]

    @cached_property
    def _hulls(self) -> dict[tuple[range, range], range]:
        return {}

    def _hull(self, queries: range, keys: range) -> range:
        host = self.host
        if host is None:
            if self.ids.device.type != "cpu":
                return keys
            host = self.ids.numpy()
        pairs = zip(host[:, queries.start : queries.stop], host[:, keys.start : keys.stop], strict=True)
        columns = np.flatnonzero(np.any([np.isin(k, q) for q, k in pairs], axis=0))
        return keys[columns[0] : columns[-1] + 1] if columns.size else range(0)

    @cached_property
    def lengths(self) -> list[list[int]] | None:
        """The lengths of the runs of equal ids in each row, if calling a kernel for each run is worthwhile.

        A dense mask costs the same however short the documents are. On CPU it pays to call the kernel once
        per document, for packed rows as for padded ones, whose padding is a document too. (On an accelerator,
        reading the ids would wait for the device.)

        None if the ids are not on the host, a document comes back after another one, or so few pairs of
        tokens would be left out that the calls would cost more than a mask.
        """
        b, s = self.ids.shape
        if self.ids.device.type != "cpu" or b * s == 0:
            return None
        runs = [torch.unique_consecutive(row, return_counts=True) for row in self.ids]
        lengths: list[list[int]] = [counts.tolist() for _, counts in runs]
        left_out = b * s * s - sum(length**2 for row in lengths for length in row)
        if left_out < _WORTH * sum(map(len, lengths)):
            return None
        return None if any(len(ids) != len(ids.unique()) for ids, _ in runs) else lengths
