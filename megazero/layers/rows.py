"""`Rows`: the rows of a micro-batch's hidden states, and how they are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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

    Ranks of ``cp`` have different columns of the sequences, as a batch is cut for them. Of these columns a
    tensor-parallel rank holds a run of rows, or all.

    Attributes:
        tp: the ranks that share the layers' weights.
        split: whether each of them holds a run of the columns (sequence parallelism).
        cp: the ranks with the other columns.
        sequence: all ranks that compute these sequences: ``cp`` x ``tp``.
        zigzag: whether a rank's columns are two runs, one from either end (see `columns_of`).
    """

    tp: Group
    split: bool = False
    cp: Group = field(default_factory=SoloGroup)
    sequence: Group = field(default_factory=SoloGroup)
    zigzag: bool = False

    @property
    def sharers(self) -> Group:
        """All ranks that compute these sequences."""
        return self.tp if self.cp.size == 1 else self.sequence

    @property
    def parts(self) -> Group:
        """The ranks that hold different rows; together they have each row once."""
        return self.sharers if self.split else self.cp

    def count(self, length: int) -> int:
        """The number of rows here of sequences of `length`."""
        return length // self.parts.size

    def columns(self, length: int) -> tuple[range, ...]:
        """The runs of columns that this rank of ``cp`` has, of sequences of `length`."""
        return columns_of(self.cp.rank, self.cp.size, length, zigzag=self.zigzag)

    def own_columns(self, x: Tensor) -> Tensor:
        """This rank's columns of x [s, ...], which all ranks have whole."""
        return chosen_runs(x, self.columns(len(x)))

    def of_columns(self, x: Tensor) -> Tensor:
        """This rank's rows of x [s/cp, ...], which has its columns."""
        return own_rows(x, self.tp) if self.split else x

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of x [s, ...], which all ranks have whole."""
        return self.of_columns(self.own_columns(x))

    def own_positions(self, positions: Positions, length: int, device: torch.device) -> Positions:
        """The positions of this rank's rows, of those of all `length` rows; a range where they are one."""
        runs = self.columns(length)
        if isinstance(positions, range) and len(runs) == 1:
            start = runs[0].start + (self.tp.rank * self.count(length) if self.split else 0)
            return positions[start : start + self.count(length)]
        return self.own(position_tensor(positions, device))

    def all_columns(self, x: Tensor) -> Tensor:
        """x [s/cp or s/cp/tp, ...] -> [s/cp, ...], for a computation that every tensor-parallel rank repeats.

        Each rank of ``cp`` computes it for its own columns.
        """
        return gather_sequence(x, self.tp) if self.split else x

    def gathered_order(self, length: int) -> Tensor | None:
        """int64 [s]: the column of each row when the rows of `parts` follow each other; None if in order."""
        if not self.zigzag or self.cp.size == 1:
            return None
        runs = (columns_of(rank, self.cp.size, length, zigzag=True) for rank in range(self.cp.size))
        return torch.cat([torch.arange(run.start, run.stop) for rank in runs for run in rank])


def columns_of(rank: int, ranks: int, length: int, *, zigzag: bool) -> tuple[range, ...]:
    """The runs of columns that rank `rank` of `ranks` has of sequences of `length`.

    With `zigzag` these are one of 2 x ranks pieces from the beginning and one from the end, so that causal
    attention gives each rank equally many pairs (Zhu et al. 2024); otherwise they are one piece of `ranks`.
    """
    if ranks == 1:
        return (range(length),)
    size = length // (2 * ranks if zigzag else ranks)
    numbers = (rank, 2 * ranks - 1 - rank) if zigzag else (rank,)
    return tuple(range(number * size, (number + 1) * size) for number in numbers)


def chosen_runs(x: Tensor, runs: Sequence[range]) -> Tensor:
    """The runs of the rows of x, one after the other."""
    parts = [x[run.start : run.stop] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


ALONE = Spread(SoloGroup())
"""All rows on one rank."""


@dataclass(frozen=True)
class Rows:
    """Describes all s rows of b sequences, even where a rank holds only its share of them.

    Attributes:
        positions: the rows' places in their sequences: a range, or int64 [s], or [s, b] where samples differ.
        documents: of [b, s]; positions attend only within equal ids, and -1 stands for padding. None: no
            such limit.
        keys: int64 [b], the key of each sample's random streams, or [s, b] where samples share a column of
            rows; None turns dropout off.
        rotary: cos and sin of this rank's columns, for each kind of layer of the model (`rotary_of`); None
            if the model rotates nothing.
        rotary_at: makes those of other columns, int64 [r, b] of whole sequences, where ranks share them.
        spread: how they lie on ranks.
        ids: int64 [b, s/cp], the tokens of this rank's columns; None where no router asks for them.
    """

    positions: Positions
    documents: Documents | None = None
    keys: Tensor | None = None
    rotary: tuple[Tensor, ...] | None = None
    spread: Spread = ALONE
    rotary_at: Callable[[Tensor], tuple[Tensor, ...] | None] | None = None
    ids: Tensor | None = None

    @property
    def whole_length(self) -> int:
        """The length of the sequences, including rows on other ranks."""
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
        if self.rotary_at is not None:
            rotary = self.rotary_at(columns)
        elif rotary is not None:
            sample = torch.arange(columns.shape[1], device=columns.device)
            rotary = tuple(t[columns, sample if t.shape[1] > 1 else 0] for t in rotary)
        return replace(
            self,
            positions=self.positions_at(columns),
            documents=None if documents is None else Documents(documents.ids.gather(1, columns.t())),
            keys=None if self.keys is None else keys_at(self.keys, columns),
            rotary=rotary,
            rotary_at=None,
            ids=None if self.ids is None else self.ids.gather(1, columns.t()),
        )

    def dropout(self, p: float, keys: Tensor, site: int | None = None) -> Dropout:
        """The dropout of this rank's rows of hidden states, with `keys` [b] or [s, b], at `site`."""
        positions, spread = self.positions, self.spread
        if spread.parts.size > 1:
            positions = spread.own_positions(positions, self.whole_length, keys.device)
            keys = keys if keys.dim() == 1 else spread.own(keys)
        return Dropout(p, keys, positions, site)


def keys_at(keys: Tensor, columns: Tensor | None) -> Tensor:
    """The `keys` [b] or [s, b] of the rows `columns`, int64 [r, b]; None for all."""
    return keys if columns is None or keys.dim() == 1 else keys.gather(0, columns)
