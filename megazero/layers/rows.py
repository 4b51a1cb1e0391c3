"""`Rows`: the rows of a micro-batch's hidden states, and how they are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megazero.layers.collectives import gather_sequence, own_rows
from megazero.mpu.group import Group
from megazero.mpu.solo_group import SoloGroup
from megazero.ops.attention import Documents
from megazero.ops.dropout import Dropout
from megazero.ops.positions import Positions, position_tensor


@dataclass(frozen=True)
class Spread:
    """How the rows of hidden states [s, b, h] lie on the ranks that compute the same sequences.

    Attributes:
        group: the ranks that compute them together.
        split: whether each rank holds s / size rows, a run of them (sequence parallelism); if not, it holds
            all.
    """

    group: Group
    split: bool = False

    def count(self, length: int) -> int:
        """The number of rows here of sequences of `length`."""
        return length // self.group.size if self.split else length

    def run(self, length: int) -> slice:
        """The rows here among the `length` rows of whole sequences."""
        rows = self.count(length)
        start = self.group.rank * rows if self.split else 0
        return slice(start, start + rows)

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of x [s, ...], which all ranks have whole."""
        return own_rows(x, self.group) if self.split else x

    def whole(self, x: Tensor) -> Tensor:
        """x [s or s/size, ...] -> [s, ...], for a computation that every rank repeats."""
        return gather_sequence(x, self.group) if self.split else x


ALONE = Spread(SoloGroup())
"""All rows on one rank."""


@dataclass(frozen=True)
class Rows:
    """The s rows of b sequences, whole, even where a rank holds its share of them only.

    Attributes:
        positions: the rows' places in their sequences: a range, or int64 [s], or [s, b] where samples differ.
        documents: of [b, s]; positions attend only within equal ids, and -1 stands for padding. None: no
            such limit.
        keys: int64 [b], the key of each sample's random streams, or [s, b] where samples share a column of
            rows; None turns dropout off.
        rotary: (cos, sin) tables of the rows, or None with learned positions.
        spread: how they lie on ranks.
    """

    positions: Positions
    documents: Documents | None = None
    keys: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    spread: Spread = ALONE

    @property
    def whole_length(self) -> int:
        """The number of rows of each sequence, those on other ranks included."""
        return len(self.positions)

    def positions_at(self, columns: Tensor | None) -> Positions:
        """The positions of the rows `columns`, int64 [r, b]; None for all."""
        if columns is None:
            return self.positions
        positions = position_tensor(self.positions, columns.device)
        return positions[columns] if positions.dim() == 1 else positions.gather(0, columns)

    def select(self, columns: Tensor) -> Rows:
        """The rows `columns` [r, b] (int64) of each sequence."""
        rotary, documents = self.rotary, self.documents
        if rotary is not None:
            sample = torch.arange(columns.shape[1], device=columns.device)
            cos, sin = (t[columns, sample if t.shape[1] > 1 else 0] for t in rotary)
            rotary = cos, sin
        return replace(
            self,
            positions=self.positions_at(columns),
            documents=None if documents is None else Documents(documents.ids.gather(1, columns.t())),
            keys=None if self.keys is None else keys_at(self.keys, columns),
            rotary=rotary,
        )

    def dropout(self, p: float, keys: Tensor, site: int | None = None) -> Dropout:
        """The dropout of this rank's rows of hidden states, with `keys` [b] or [s, b], at `site`."""
        positions, spread = self.positions, self.spread
        if spread.split:
            positions = positions[spread.run(self.whole_length)]
            keys = keys if keys.dim() == 1 else spread.own(keys)
        return Dropout(p, keys, positions, site)


def keys_at(keys: Tensor, columns: Tensor | None) -> Tensor:
    """The `keys` [b] or [s, b] of the rows `columns`, int64 [r, b]; None for all."""
    return keys if columns is None or keys.dim() == 1 else keys.gather(0, columns)
