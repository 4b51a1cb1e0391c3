"""Which rank sits where: pure coordinates over the mesh axes, no communication.

Ranks are laid out row-major over `AXES`, the last axis fastest, so tensor-parallel neighbours are
adjacent ranks and land on one node. The experts' axis `ep` divides what a user calls data
parallelism: each of its ranks reads different data, so the replicas of a dense parameter span
`dp x cp x ep` and those of an expert `dp x cp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from megazero.errors import ConfigError

AXES = ("pp", "dp", "cp", "ep", "tp")

# Every communicator that megazero uses, and the axes that it spans.
COMMUNICATORS = MappingProxyType(
    {
        "tp": ("tp",),
        "pp": ("pp",),
        "cp": ("cp",),
        "ep": ("ep",),
        "data": ("dp", "ep"),  # ranks that read different samples
        "replica": ("dp", "cp", "ep"),  # ranks that hold the same dense parameters
        "expert_replica": ("dp", "cp"),  # ranks that hold the same expert parameters
        "model": ("pp", "tp"),  # ranks that together hold one whole dense model
        "world": AXES,
    }
)


@dataclass(frozen=True)
class Coordinate:
    """A rank's place on each axis."""

    pp: int
    dp: int
    cp: int
    ep: int
    tp: int


@dataclass(frozen=True)
class ProcessGrid:
    """The sizes of the mesh axes.

    Raises:
        ConfigError: an axis is smaller than one.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        bad = [
            f"`{axis}` must be at least 1, but is {getattr(self, axis)}" for axis in AXES if self[axis] < 1
        ]
        if bad:
            raise ConfigError(bad)

    def __getitem__(self, axis: str) -> int:
        return getattr(self, axis)

    @property
    def world_size(self) -> int:
        return math.prod(self[axis] for axis in AXES)

    @property
    def data_parallel_size(self) -> int:
        """How many ranks read different samples."""
        return self.dp * self.ep

    @classmethod
    def factor(cls, world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> ProcessGrid:
        """The grid of `world_size` ranks in which `dp` takes what the other axes leave.

        Raises:
            ConfigError: the other axes do not divide `world_size`.
        """
        model = tp * pp * cp * ep
        if world_size % model:
            raise ConfigError(
                f"`world size` must be a multiple of tensor x pipeline x context x expert parallel size "
                f"({tp} x {pp} x {cp} x {ep} = {model}), but is {world_size}; start a multiple of {model} "
                f"ranks or choose sizes whose product divides {world_size}"
            )
        return cls(pp=pp, dp=world_size // model, cp=cp, ep=ep, tp=tp)

    def coordinate(self, rank: int) -> Coordinate:
        """Where `rank` sits."""
        assert 0 <= rank < self.world_size, f"rank {rank} outside a world of {self.world_size}"
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self[axis])
        return Coordinate(**place)

    def rank(self, place: Coordinate) -> int:
        """The rank that sits at `place`; the inverse of `coordinate`."""
        rank = 0
        for axis in AXES:
            rank = rank * self[axis] + getattr(place, axis)
        return rank

    def members(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that share all of `rank`'s coordinates but those on `axes`, in rank order."""
        place = self.coordinate(rank)
        spans = [range(self[a]) if a in axes else (getattr(place, a),) for a in AXES]
        return tuple(self.rank(Coordinate(*values)) for values in product(*spans))

    def ends(self, rank: int) -> tuple[int, ...]:
        """The first and the last pipeline stage at `rank`'s other coordinates; `rank` alone if it is neither.

        These two hold a tied embedding.
        """
        line = self.members(rank, ("pp",))
        return tuple(dict.fromkeys((line[0], line[-1]))) if rank in (line[0], line[-1]) else (rank,)

    def node(self, rank: int, size: int) -> tuple[int, ...]:
        """The `size` neighbours among the replicas of `rank`'s dense parameters that `rank` is one of.

        Raises:
            ConfigError: `size` does not divide the number of replicas.
        """
        replicas = self.members(rank, COMMUNICATORS["replica"])
        if len(replicas) % size:
            raise ConfigError(
                f"`hpz_partition_size` must divide the data-parallel size ({len(replicas)}), but is {size}; "
                "choose a divisor"
            )
        first = replicas.index(rank) // size * size
        return replicas[first : first + size]

    def partition(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups over `axes`: disjoint, covering every rank, ordered by first member."""
        return tuple(sorted({self.members(rank, axes) for rank in range(self.world_size)}))
