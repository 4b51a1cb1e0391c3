"""`Tokens`: the tokens of a micro-batch that a rank routes, and their positions in the sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.layers.collectives import gather_rows, gather_sequence, own_rows, split_rows
from megazero.layers.rows import Rows, Spread
from megazero.mpu.group import Group
from megazero.ops.positions import position_tensor


@dataclass(frozen=True)
class Tokens:
    """A rank's share of the tokens of `b` sequences.

    Tensor-parallel ranks divide the tokens of a micro-batch evenly, with sequence parallelism or without, so
    that no token is routed twice. A share is a contiguous part of the flattened rows [s/cp, b]; the last
    share may end in padding.

    Attributes:
        number: int64 [n], each token's index in the flattened [s, b] of whole sequences.
        sequence: int64 [n], the number of each token's sequence.
        position: int64 [n], each token's position in its sequence.
        real: bool [n], False for padding, which no expert sees; None without padding.
        lengths: int64 [b], number of tokens of each whole sequence, without padding.
        sharers: the ranks that share these sequences (axes cp and tp).
        columns: the ranks that share the same columns (axis tp).
    """

    number: Tensor
    sequence: Tensor
    position: Tensor
    real: Tensor | None
    lengths: Tensor
    sharers: Group
    columns: Group

    @property
    def count(self) -> int:
        """Number of rows in the share."""
        return len(self.sequence)

    def masked(self, values: Tensor) -> Tensor:
        """`values` [n, ...], with zeros for padding."""
        if self.real is None:
            return values
        return values * self.real.view(-1, *(1 for _ in values.shape[1:])).to(values.dtype)

    def whole(self, values: Tensor) -> Tensor:
        """Concatenate the `values` [n, ...] of all shares."""
        return values if self.sharers.size == 1 else gather_rows(values, self.sharers)

    def own(self, values: Tensor) -> Tensor:
        """This rank's share of `values` [N, ...], the inverse of `whole`."""
        return own_rows(values, self.sharers)

    def everywhere(self) -> Tokens:
        """The tokens of all shares."""
        if self.sharers.size == 1:
            return self
        real = None if self.real is None else self.whole(self.real)
        number, sequence, position = map(self.whole, (self.number, self.sequence, self.position))
        return Tokens(number, sequence, position, real, self.lengths, self.sharers, self.columns)


def take_share(x: Tensor, rows: Rows) -> tuple[Tensor, Tokens]:
    """Take this rank's share [n, h] of the tokens of x [s, b, h] ([s/tp, b, h] with sequence parallelism).

    With context parallelism, s counts this rank's columns only.
    """
    spread, device, b = rows.spread, x.device, x.shape[1]
    length, tp = rows.whole_length, spread.tp
    own, total = x.reshape(-1, x.shape[-1]), length // spread.cp.size * b
    share = -(-total // tp.size)
    if not spread.split and tp.size > 1:
        own = split_rows(F.pad(own, (0, 0, 0, share * tp.size - total)), tp)
    # The index among the rows of this rank's columns; `column` is then the one among whole sequences.
    place = torch.arange(tp.rank * share, (tp.rank + 1) * share, device=device)
    inside = place < total
    place, sequence = place.clamp_max(total - 1) // b, place % b
    column = spread.own_columns(torch.arange(length, device=device))[place] if spread.cp.size > 1 else place
    position = position_tensor(rows.positions, device)
    position = position[column] if position.dim() == 1 else position[column, sequence]
    real = None
    if rows.documents is None:
        lengths = torch.full((b,), length, device=device)
    else:
        tokens = rows.documents.ids >= 0
        lengths = tokens.sum(1)
        real = tokens[sequence, column]
    if share * tp.size > total:
        real = inside if real is None else real & inside
    return own, Tokens(column * b + sequence, sequence, position, real, lengths, spread.sharers, tp)


def gather_shares(rows: Tensor, shape: torch.Size, spread: Spread) -> Tensor:
    """Gather all ranks' shares [n, h] into hidden states of `shape`: the inverse of `take_share`."""
    if spread.split or spread.tp.size == 1:
        return rows.view(shape)
    return gather_sequence(rows, spread.tp)[: shape[0] * shape[1]].view(shape)
