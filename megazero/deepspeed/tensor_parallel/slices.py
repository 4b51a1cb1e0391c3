"""Slices of a weight: which features of it a tensor-parallel rank has, and the whole from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.errors import ConfigError
from megazero.mpu.group import Group
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec


@dataclass(frozen=True)
class Piece:
    """Features of a weight that are divided over the ranks by one rule; a fused weight has several.

    Attributes:
        width: number of features.
        units: number of equal parts that must not be divided further.
        used: the start and width of what this rank uses, if each rank has all of the piece; None if each has
            its own part.
        align: the features of a rank are a multiple of this, which some kernels need.
    """

    width: int
    units: int
    used: tuple[int, int] | None = None
    align: int = 1

    def local(self, ranks: int) -> int:
        """Features on one rank, zeros at the end included."""
        size = -(-self.units // ranks) * (self.width // self.units)
        return -(-size // self.align) * self.align

    def of(self, whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
        """A rank's part of the piece."""
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
class Sliced:
    """How a parameter is made of slices of a whole weight.

    Attributes:
        name: the name of the whole weight.
        shape: its shape.
        dim: the dim that the pieces follow each other along.
        pieces: what they are.
        whole: whether each rank keeps the whole weight, although it uses only a part of it.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    pieces: tuple[Piece, ...]
    whole: bool = False

    def __post_init__(self) -> None:
        width = sum(piece.width for piece in self.pieces)
        if width != self.shape[self.dim]:
            raise ConfigError(
                f"`{self.name}` must have the layout of its family, "
                f"{' + '.join(str(p.width) for p in self.pieces)} "
                f"features, but has {self.shape[self.dim]}; its layout is not known here, so name it in "
                "`partition_config`"
            )

    def of(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's slice of the whole weight."""
        if self.whole:
            return whole
        parts = whole.split([piece.width for piece in self.pieces], self.dim)
        own = [piece.of(part, self.dim, rank, ranks) for piece, part in zip(self.pieces, parts, strict=True)]
        return torch.cat(own, self.dim).contiguous() if len(own) > 1 else own[0].contiguous()

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """The whole weight from the slices of all ranks."""
        if self.whole:
            return slices[0]
        ranks = len(slices)
        sizes = [piece.used[1] if piece.used else piece.local(ranks) for piece in self.pieces]
        split = [part.split(sizes, self.dim) for part in slices]
        parts = []
        for number, piece in enumerate(self.pieces):
            shares = max(1, ranks * sizes[number] // piece.width) if piece.used else 1
            own = [part[number] for part in split][::shares]
            parts.append(torch.cat(own, self.dim).narrow(self.dim, 0, piece.width))
        return torch.cat(parts, self.dim)

    def spec(self, ranks: int) -> ParamSpec:
        """The spec that ZeRO, norms and checkpoints read.

        Equal pieces are a dim of their own, so that a checkpoint holds the weight in an order that depends on
        no layout. Unequal ones do not fit that; the name then carries the number of ranks.

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
                f"({ranks}) to be trained, because it holds queries, keys and values of unequal widths, "
                "but has "
                f"{min(piece.units for piece in self.pieces)}; choose fewer ranks"
            )
        return ParamSpec(f"{self.name}@tp{ranks}", self.shape, zeros, (Cut(dim, "tp"),))


def sliced_of(param: Tensor) -> Sliced | None:
    """How the parameter was sliced; None if it is whole."""
    sliced = param.__dict__.get("sliced")
    return sliced if isinstance(sliced, Sliced) else None


def slice_parameter(param: nn.Parameter, sliced: Sliced, group: Group, *, trained: bool) -> None:
    """Replace a parameter's values by this rank's slice; it stays the same object.

    Raises:
        ConfigError: it is to be trained, but its slices cannot be.
    """
    if trained:
        param.__dict__["spec"] = sliced.spec(group.size)
    param.__dict__["sliced"] = sliced
    if not sliced.whole:
        # A copy, because a view would keep the whole weight in memory.
        param.data = sliced.of(param.data, group.rank, group.size).clone()


def whole_weight(local: Tensor, sliced: Sliced, group: Group) -> Tensor:
    """The whole weight; all tensor-parallel ranks call this."""
    if sliced.whole:
        return local
    flat = local.new_empty(group.size * local.numel())
    group.all_gather(flat, local.contiguous().view(-1)).wait()
    return sliced.join(list(flat.view(group.size, *local.shape)))
