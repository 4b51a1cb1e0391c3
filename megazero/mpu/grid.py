"""Which rank sits where: pure coordinates over the mesh axes, no communication.

The fields of `ProcessGrid` are the one list of axes; every other list of them is derived from it. Ranks are
laid out row-major over the axes, the last one fastest, so tensor-parallel neighbours are adjacent ranks and
land on one node. The experts' axis `ep` divides what a user calls data parallelism: each of its ranks reads
different data and holds different experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from types import MappingProxyType
from typing import Literal

from megazero.errors import ConfigError


@dataclass(frozen=True)
class Axis:
    """What tells the ranks along one axis of the mesh apart.

    Attributes:
        setting: the field of `ParallelConfig` that gives the axis's size; None if the axis takes what the
            other axes leave.
        model: whether the ranks hold different stages of the model or different slices of the parameters
            that are cut over this axis; None if they hold the same parameters.
        batch: whether the ranks read different samples or different positions of the same samples; None if
            they read the same data.
    """

    setting: str | None = None
    model: Literal["stages", "slices"] | None = None
    batch: Literal["samples", "positions"] | None = None


def _axis(axis: Axis) -> int:
    return field(default=1, metadata={"axis": axis})


@dataclass(frozen=True)
class ProcessGrid:
    """The sizes of the mesh axes.

    Raises:
        ConfigError: an axis is smaller than one.
    """

    pp: int = _axis(Axis("pipeline_model_parallel_size", model="stages"))
    dp: int = _axis(Axis(batch="samples"))
    cp: int = _axis(Axis("context_parallel_size", batch="positions"))
    ep: int = _axis(Axis("expert_model_parallel_size", model="slices", batch="samples"))
    tp: int = _axis(Axis("tensor_model_parallel_size", model="slices"))

    def __post_init__(self) -> None:
        bad = [f"`{axis}` must be at least 1, but is {self[axis]}" for axis in AXES if self[axis] < 1]
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
        return math.prod(self[axis] for axis in COMMUNICATORS["data"])

    @classmethod
    def factor(cls, world_size: int, **sizes: int) -> ProcessGrid:
        """The grid of `world_size` ranks with axes of these sizes; `dp` takes what they leave.

        Raises:
            ConfigError: the sizes do not divide `world_size`.
        """
        assert "dp" not in sizes, "`dp` takes what the other axes leave"
        grid = cls(**sizes)
        taken = grid.world_size
        if world_size % taken:
            factors = " x ".join(f"`{AXES[a].setting}` ({grid[a]})" for a in AXES if grid[a] > 1)
            raise ConfigError(
                f"`world size` must be a multiple of {factors} = {taken}, but is {world_size}; start a "
                f"multiple of {taken} ranks or choose sizes whose product divides {world_size}"
            )
        return replace(grid, dp=world_size // taken)

    def place(self, rank: int) -> Place:
        """Where `rank` sits."""
        return Place(self, rank)

    def rank(self, indices: Mapping[str, int]) -> int:
        """The rank that sits at this index along each axis; the inverse of `place`."""
        rank = 0
        for axis in AXES:
            rank = rank * self[axis] + indices[axis]
        return rank

    def members(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that share all of `rank`'s indices except those along `axes`, in rank order."""
        place = self.place(rank)
        spans = [range(self[axis]) if axis in axes else (place.index(axis),) for axis in AXES]
        return tuple(self.rank(dict(zip(AXES, indices, strict=True))) for indices in product(*spans))

    def ends(self, rank: int) -> tuple[int, ...]:
        """The first and the last pipeline stage at `rank`'s other indices; `rank` alone if it is neither.

        Those two stages hold a tied embedding.
        """
        line = self.members(rank, ("pp",))
        return tuple(dict.fromkeys((line[0], line[-1]))) if rank in (line[0], line[-1]) else (rank,)

    def node(self, rank: int, size: int) -> tuple[int, ...]:
        """The block of `size` adjacent replicas of `rank`'s dense parameters that `rank` belongs to.

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


@dataclass(frozen=True)
class Place:
    """Where one rank sits in its grid, which is all that its slice of a parameter depends on."""

    grid: ProcessGrid
    rank: int

    def __post_init__(self) -> None:
        world_size = self.grid.world_size
        assert 0 <= self.rank < world_size, f"rank {self.rank} is outside a world of {world_size}"

    def index(self, axis: str) -> int:
        """This rank's index along an axis."""
        names = tuple(AXES)
        faster = math.prod(self.grid[name] for name in names[names.index(axis) + 1 :])
        return self.rank // faster % self.grid[axis]

    def size(self, axis: str) -> int:
        """How many ranks the axis has."""
        return self.grid[axis]


AXES: Mapping[str, Axis] = MappingProxyType({f.name: f.metadata["axis"] for f in fields(ProcessGrid)})

# The axes whose ranks hold different slices of a parameter: a parameter may be cut over any of them.
SLICE_AXES = tuple(name for name, axis in AXES.items() if axis.model == "slices")
_MODEL_AXES = tuple(name for name, axis in AXES.items() if axis.model is not None)
_BATCH_AXES = tuple(name for name, axis in AXES.items() if axis.batch is not None)

# Every communicator that megazero uses, and the axes that it spans.
COMMUNICATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Each axis by itself, except `dp`, which nothing is sent over alone.
        **{name: (name,) for name, axis in AXES.items() if axis.setting is not None},
        # Ranks that read different samples.
        "data": tuple(name for name, axis in AXES.items() if axis.batch == "samples"),
        # Ranks that hold the same dense parameters, and the same parameters of experts.
        "replica": _BATCH_AXES,
        "expert_replica": tuple(name for name in _BATCH_AXES if name not in SLICE_AXES),
        # Ranks that together read one whole batch, and ranks that together hold one whole model.
        "batch": _BATCH_AXES,
        "model": _MODEL_AXES,
        "world": tuple(AXES),
    }
)
