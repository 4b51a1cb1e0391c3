"""Slicing a weight over tensor-parallel ranks, and joining the slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.errors import ConfigError
from megazero.mpu.group import Group
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec


@dataclass(frozen=True)
class WeightPiece:
    """Features of a weight that are divided evenly over the ranks; a fused weight has several pieces.

    Attributes:
        width: the number of features.
        units: the number of indivisible equal parts.
        used: the start and the width of the features that this rank uses, if each rank stores the whole
            piece; None if each rank stores its own part.
        align: some kernels need the features of a rank to be a multiple of this.
    """

    width: int
    units: int
    used: tuple[int, int] | None = None
    align: int = 1

    def local(self, ranks: int) -> int:
        """Return the number of features on one rank, padding included."""
        size = -(-self.units // ranks) * (self.width // self.units)
        return -(-size // self.align) * self.align

    def of(self, whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
        """Return a rank's part of the piece, padded with zeros at the end."""
        if self.used is not None:
            return whole.narrow(dim, *self.used)
        size = self.local(ranks)
        start = min(rank * size, self.width)
        present = whole.narrow(dim, start, min(size, self.width - start))
        if present.shape[dim] == size:
            return present
        shape = list(whole.shape)
        shape[dim] = size
        padded = whole.new_zeros(shape)
        padded.narrow(dim, 0, present.shape[dim]).copy_(present)
        return padded


@dataclass(frozen=True)
class SlicedWeight:
    """How a weight is sliced.

    Attributes:
        name: the name of the weight.
        shape: the shape of the whole weight.
        dim: the dim along which the pieces are concatenated.
        pieces: the pieces.
        whole: whether each rank stores the whole weight, although it uses only a part.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    pieces: tuple[WeightPiece, ...]
    whole: bool = False

    def __post_init__(self) -> None:
        width = sum(piece.width for piece in self.pieces)
        if width != self.shape[self.dim]:
            raise ConfigError(
                f"`{self.name}` must have the layout of its family, "
                f"{' + '.join(str(p.width) for p in self.pieces)} features, but has {self.shape[self.dim]}; "
                "its layout is not known here, so name it in `partition_config`"
            )

    def of(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a rank's slice of the whole weight."""
        if self.whole:
            return whole
        parts = whole.split([piece.width for piece in self.pieces], self.dim)
        own = [piece.of(part, self.dim, rank, ranks) for piece, part in zip(self.pieces, parts, strict=True)]
        return torch.cat(own, self.dim).contiguous() if len(own) > 1 else own[0].contiguous()

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """Join the slices of all ranks to the whole weight."""
        if self.whole:
            return slices[0]
        ranks = len(slices)
        sizes = [piece.used[1] if piece.used else piece.local(ranks) for piece in self.pieces]
        split = [part.split(sizes, self.dim) for part in slices]
        joined = []
        for number, piece in enumerate(self.pieces):
            copies = max(1, ranks * sizes[number] // piece.width) if piece.used else 1
            parts = [part[number] for part in split][::copies]
            joined.append(torch.cat(parts, self.dim).narrow(self.dim, 0, piece.width))
        return torch.cat(joined, self.dim)

    def spec(self, ranks: int) -> ParamSpec:
        """Return the parameter's spec for ZeRO, gradient norms and checkpoints.

        Equal pieces become a dim of their own, so that a checkpoint's weight does not depend on the number of
        ranks. With unequal pieces it does, and the name contains that number.

        Raises:
            ConfigError: unequal pieces do not divide by the ranks.
        """
        zeros = InitialValues("zeros")
        if self.whole:
            return ParamSpec(self.name, self.shape, zeros, partial_grad=True)
        first, dim = self.pieces[0], self.dim
        padded = first.local(ranks) * ranks
        if len(self.pieces) == 1:
            cut = Cut(dim, "tp", None if padded == first.width else padded)
            return ParamSpec(self.name, self.shape, zeros, (cut,))
        if len(set(self.pieces)) == 1 and first.used is None:
            shape = (*self.shape[:dim], len(self.pieces), first.width, *self.shape[dim + 1 :])
            return ParamSpec(
                self.name, shape, zeros, (Cut(dim + 1, "tp", None if padded == first.width else padded),)
            )
        if any(piece.used or piece.units % ranks for piece in self.pieces):
            raise ConfigError(
                f"`{self.name}` must have as many key-value heads as a multiple of the tensor-parallel ranks "
                f"({ranks}) to be trained, because it holds queries, keys and values of unequal widths, but "
                f"has {min(piece.units for piece in self.pieces)}; choose fewer ranks"
            )
        return ParamSpec(f"{self.name}@tp{ranks}", self.shape, zeros, (Cut(dim, "tp"),))


def sliced_of(param: Tensor) -> SlicedWeight | None:
    """Return how a parameter was sliced; None if it is whole."""
    sliced = param.__dict__.get("sliced")
    return sliced if isinstance(sliced, SlicedWeight) else None


def slice_parameter(param: nn.Parameter, sliced: SlicedWeight, group: Group, *, trained: bool) -> None:
    """Replace the values of a parameter by this rank's slice, in place.

    Raises:
        ConfigError: the slices cannot be trained, but `trained` is true.
    """
    if trained:
        param.__dict__["spec"] = sliced.spec(group.size)
    param.__dict__["sliced"] = sliced
    if not sliced.whole:
        # A copy, because a view would keep the whole weight in memory.
        param.data = sliced.of(param.data, group.rank, group.size).clone()


def whole_weight(local: Tensor, sliced: SlicedWeight, group: Group) -> Tensor:
    """Gather the whole weight; all tensor-parallel ranks call this."""
    if sliced.whole:
        return local
    flat = local.new_empty(group.size * local.numel())
    group.all_gather(flat, local.contiguous().view(-1)).wait()
    return sliced.join(list(flat.view(group.size, *local.shape)))
