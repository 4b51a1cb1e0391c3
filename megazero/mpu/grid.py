"""The places of ranks: pure coordinates over the mesh axes, no communication.

`AXES` is the one list of axes; every other list of them is derived from it. The ranks of a pipeline stage are
numbered in two ways. Dense parameters, and the batch, see them as `dp` x `cp` x `tp`; experts see the same
ranks as `edp` x `ep` x `etp`, so that their sizes are free of each other (the parallel folding of Liu et al.
2025, arXiv:2504.14960). Both ways are row-major, the last axis fastest, so tensor-parallel neighbours are
adjacent ranks and land on one node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from types import MappingProxyType
from typing import Literal

from megazero.config.fields import FIELDS
from megazero.errors import ConfigError


@dataclass(frozen=True)
class Axis:
    """The differences between the ranks along one axis of the mesh.

    Attributes:
        setting: the field of `ParallelConfig` that gives the axis's size; None if the axis takes what the
            other axes leave.
        model: whether the ranks hold different stages of the model or different slices of the parameters
            that are cut over this axis; None if they hold the same parameters.
        batch: whether the ranks read different samples or different positions of the same samples; None if
            they read the same data.
        experts: whether this is an axis of the numbering for experts. Their ranks share tokens, whoever read
            them, so `batch` is None there.
    """

    setting: str | None = None
    model: Literal["stages", "slices"] | None = None
    batch: Literal["samples", "positions"] | None = None
    experts: bool = False


# Axis -> the setting that gives its size.
_SIZES = MappingProxyType({spec.axis: spec.name for spec in FIELDS if spec.axis})
AXES: Mapping[str, Axis] = MappingProxyType(
    {
        "pp": Axis(_SIZES["pp"], model="stages"),
        "dp": Axis(batch="samples"),
        "cp": Axis(_SIZES["cp"], batch="positions"),
        "tp": Axis(_SIZES["tp"], model="slices"),
        "edp": Axis(experts=True),
        "ep": Axis(_SIZES["ep"], model="slices", experts=True),
        "etp": Axis(_SIZES["etp"], model="slices", experts=True),
    }
)


Ranks = Sequence[int]
"""World ranks in group order: a `range` where they are equally far apart, which takes no memory for each."""


def as_ranks(ranks: Ranks) -> Ranks:
    """Ranks in canonical form, so that equal groups compare equal: a `range` if possible, else a tuple."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(steps) > 1 or not min(steps, default=1) > 0:
        return tuple(ranks)
    step = min(steps, default=1)
    return range(ranks[0], ranks[-1] + step, step)


def _names(wanted: Iterable[tuple[str, Axis]]) -> tuple[str, ...]:
    return tuple(name for name, _ in wanted)


# The two numberings of the ranks, slowest axis first.
_DENSE = _names((n, a) for n, a in AXES.items() if not a.experts)
_EXPERTS = _names((n, a) for n, a in AXES.items() if a.experts or a.model == "stages")


@dataclass(frozen=True)
class ProcessGrid:
    """The sizes of the mesh axes. `edp` takes what `ep` and `etp` leave of a stage's ranks.

    Attributes:
        etp: by default, `tp`.
        cp_inner: how many adjacent ranks of `cp` exchange heads; their blocks then exchange keys and values.

    Raises:
        ConfigError: an axis is smaller than one, or the experts' axes do not divide a stage.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 0
    cp_inner: int = 1

    def __post_init__(self) -> None:
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)
        given = [axis for axis in AXES if axis != "edp"]
        bad = [f"`{axis}` must be at least 1, but is {self[axis]}" for axis in given if self[axis] < 1]
        if bad:
            raise ConfigError(bad)
        stage = self.dp * self.cp * self.tp
        if stage % (self.ep * self.etp):
            raise ConfigError(
                f"`{AXES['ep'].setting}` ({self.ep}) x `{AXES['etp'].setting}` ({self.etp}) must divide the "
                f"ranks of a pipeline stage, but there are {stage}; choose sizes whose product divides that"
            )

    def __getitem__(self, axis: str) -> int:
        size: int = getattr(self, axis)
        return size

    @property
    def edp(self) -> int:
        """The number of ranks that hold the same slices of the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        return math.prod(self[axis] for axis in _DENSE)

    @classmethod
    def factor(cls, world_size: int, **sizes: int) -> ProcessGrid:
        """The grid of `world_size` ranks with axes of these sizes; `dp` takes what they leave.

        Raises:
            ConfigError: the sizes do not divide `world_size`.
        """
        assert "dp" not in sizes, "`dp` takes what the other axes leave"
        experts = {axis: sizes.pop(axis) for axis in ("ep", "etp", "cp_inner") if axis in sizes}
        grid = cls(**sizes)
        taken = grid.pp * grid.cp * grid.tp
        if world_size % taken:
            factors = " x ".join(f"`{AXES[a].setting}` ({grid[a]})" for a in _DENSE if grid[a] > 1)
            raise ConfigError(
                f"`world size` must be a multiple of {factors} = {taken}, but is {world_size}; start a "
                f"multiple of {taken} ranks or choose sizes whose product divides {world_size}"
            )
        return replace(grid, dp=world_size // taken, **experts)

    def place(self, rank: int) -> Place:
        """The place of `rank`."""
        return Place(self, rank)

    def rank(self, indices: Mapping[str, int]) -> int:
        """The rank that sits at this index along each axis of one numbering; the inverse of `place`."""
        rank = 0
        for axis in numbering(indices):
            rank = rank * self[axis] + indices[axis]
        return rank

    def members(self, rank: int, axes: tuple[str, ...]) -> Ranks:
        """The ranks that share all of `rank`'s indices except those along `axes`, in rank order.

        The axes are of one numbering.
        """
        place, first, stride = self.place(rank), rank, 1
        spans: list[range] = []
        for axis in reversed(numbering(axes)):
            size = self[axis]
            if axis in axes and size > 1:
                first -= place.index(axis) * stride
                if spans and spans[0].stop == stride:  # this axis goes on where the faster ones end
                    spans[0] = range(0, stride * size, spans[0].step)
                else:
                    spans.insert(0, range(0, stride * size, stride))
            stride *= size
        if len(spans) == 1:
            return range(first, first + spans[0].stop, spans[0].step)
        return as_ranks([first + sum(offsets) for offsets in product(*spans)])

    def at_stages(self, rank: int, stages: tuple[int, ...]) -> Ranks:
        """The ranks of some pipeline stages at `rank`'s other indices; `rank` alone if it is at none.

        A stage below 0 counts from the last.
        """
        line = self.members(rank, ("pp",))
        ranks = list(dict.fromkeys(line[stage] for stage in stages))
        return as_ranks(ranks if rank in ranks else [rank])

    def node(self, rank: int, size: int) -> Ranks:
        """The block of `size` adjacent replicas of `rank`'s dense parameters that `rank` belongs to.

        Raises:
            ConfigError: `size` does not divide the number of replicas.
        """
        replicas = self.members(rank, COMMUNICATORS["replica"])
        if len(replicas) % size:
            raise ConfigError(
                f"the replicas on one node must divide the data-parallel x context-parallel ranks "
                f"({len(replicas)}), but are {size}; choose a divisor"
            )
        first = replicas.index(rank) // size * size
        return replicas[first : first + size]

    def peers(self, rank: int, size: int) -> Ranks:
        """The replicas of `rank`'s dense parameters at its place in their blocks of `size`, one per block."""
        replicas = self.members(rank, COMMUNICATORS["replica"])
        return replicas[replicas.index(rank) % size :: size]

    def context_block(self, rank: int) -> Ranks:
        """The adjacent ranks of `cp` with which `rank` exchanges heads."""
        line = self.members(rank, ("cp",))
        first = line.index(rank) // self.cp_inner * self.cp_inner
        return line[first : first + self.cp_inner]

    def context_peers(self, rank: int) -> Ranks:
        """The ranks of `cp` at `rank`'s place in their blocks, with which it exchanges keys and values."""
        line = self.members(rank, ("cp",))
        return line[line.index(rank) % self.cp_inner :: self.cp_inner]

    def partition(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups over `axes`: disjoint, covering every rank, ordered by first member."""
        return tuple(sorted({tuple(self.members(rank, axes)) for rank in range(self.world_size)}))


@dataclass(frozen=True)
class Place:
    """The place of one rank in its grid; nothing else decides its slice of a parameter."""

    grid: ProcessGrid
    rank: int

    def __post_init__(self) -> None:
        world_size = self.grid.world_size
        assert 0 <= self.rank < world_size, f"rank {self.rank} is outside a world of {world_size}"

    def index(self, axis: str) -> int:
        """This rank's index along an axis."""
        names = numbering((axis,))
        faster = math.prod(self.grid[name] for name in names[names.index(axis) + 1 :])
        return self.rank // faster % self.grid[axis]

    def size(self, axis: str) -> int:
        """The number of ranks along the axis."""
        return self.grid[axis]


def numbering(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes of the numbering that all of `axes` are part of, slowest first."""
    wanted = set(axes)
    names = next((names for names in (_DENSE, _EXPERTS) if wanted <= set(names)), None)
    assert names is not None, f"{sorted(wanted)} are axes of two numberings"
    return names


# The axes whose ranks hold different slices of a parameter: a parameter may be cut over any of one numbering.
SLICE_AXES = _names((n, a) for n, a in AXES.items() if a.model == "slices")
_MODEL_AXES = _names((n, AXES[n]) for n in _DENSE if AXES[n].model is not None)
_BATCH_AXES = _names((n, a) for n, a in AXES.items() if a.batch is not None)

# Every communicator that megazero uses, and the axes that it spans.
COMMUNICATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Each axis with a size of its own, by itself.
        **{name: (name,) for name, axis in AXES.items() if axis.setting is not None},
        # Ranks that compute the same sequences together.
        "sequence": ("cp", "tp"),
        # Ranks that read different samples.
        "data": _names((n, a) for n, a in AXES.items() if a.batch == "samples"),
        # Ranks that hold the same dense parameters, and the same parameters of experts.
        "replica": _BATCH_AXES,
        "expert_replica": ("edp",),
        # Ranks that hold all experts together, and therefore exchange tokens.
        "expert": _names((n, a) for n, a in AXES.items() if a.experts and a.model == "slices"),
        # Ranks that together read one whole batch, those of one stage, and those that hold a whole model.
        "batch": _BATCH_AXES,
        "stage": tuple(name for name in _DENSE if AXES[name].model != "stages"),
        "model": _MODEL_AXES,
        "world": _DENSE,
    }
)


def slice_axes(replicas: str) -> tuple[str, ...]:
    """The axes over which a parameter may be cut if its replicas are the ranks of the group `replicas`."""
    names = numbering(COMMUNICATORS[replicas])
    return tuple(name for name in SLICE_AXES if name in names)


def stage_of_one_model(grid: ProcessGrid, sharers: int = 1) -> int:
    """The ranks of a pipeline stage that compute one model together, with `sharers` of its sequences."""
    return math.lcm(sharers * grid.tp, grid.ep * grid.etp)


def layout_words(grid: ProcessGrid, chunks: int = 1) -> str:
    """The sizes above 1 in short, with the chunks on each pipeline stage as V: ``T8 x P16 x V2 x D8``."""
    sizes = {"T": grid.tp, "P": grid.pp, "V": chunks, "C": grid.cp, "D": grid.dp, "E": grid.ep}
    return " x ".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "one rank"
