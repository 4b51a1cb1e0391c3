"""DeepSpeed's topologies: coordinates of ranks along named axes, without communication."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from megazero.errors import ConfigError


class ProcessTopology:
    """Ranks on a grid with named axes; the last axis varies fastest.

    Args:
        axes: the names of the axes.
        dims: the number of ranks along each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        self.axes = list(axes)
        self.dims = list(dims)
        make: Callable[..., Callable[..., tuple[int, ...]]] = namedtuple
        self.ProcessCoord = make("ProcessCoord", self.axes)
        places = product(*(range(size) for size in self.dims))
        self.mapping = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at coordinates along all axes.

        Raises:
            ConfigError: an axis is missing or unknown, or a coordinate is outside of the grid.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ConfigError(
                f"`get_rank` must be given one coordinate for each of {self.axes}, but is given "
                f"{coord_kwargs}; use `filter_match` for several ranks"
            )
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise ConfigError(
                f"the coordinates must lie within {dict(zip(self.axes, self.dims, strict=True))}, but are "
                f"{coord_kwargs}; count from 0"
            )
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """The names of the axes."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """A rank's coordinates as text for names of files, such as ``model_01``."""
        place = self.get_coord(rank)
        named = zip(self.axes, place, strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{at:02d}" for axis, at in named if axis not in omit_axes)

    def get_dim(self, axis: str) -> int:
        """The number of ranks along an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank, as a named tuple.

        Raises:
            ConfigError: there is no such rank.
        """
        for place, number in self.mapping.items():
            if number == rank:
                return place
        raise ConfigError(
            f"`rank` must be below the number of ranks of the topology ({self.world_size()}), but is {rank}; "
            "make the topology as large as the world"
        )

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ in `axis` alone; none if there is no such axis."""
        if axis not in self.axes:
            return []
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, rank in self.mapping.items():
            others = tuple(at for name, at in zip(self.axes, place, strict=True) if name != axis)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with these coordinates.

        Raises:
            ConfigError: there is no such axis.
        """
        unknown = [axis for axis in filter_kwargs if axis not in self.axes]
        if unknown:
            raise ConfigError(f"an axis must be one of {self.axes}, but is {unknown[0]!r}; name one of them")
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == at for axis, at in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks with coordinate `idx` along an axis.

        Raises:
            ConfigError: there is no such axis.
        """
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """`num_pp` stages of `num_dp` replicas; the ranks of a stage are adjacent."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """`num_pp` stages of `num_dp` replicas of `num_mp` tensor-parallel ranks, which are adjacent."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def default_topology(world_size: int) -> PipeDataParallelTopology:
    """DeepSpeed's default: the world size's prime factors go to stages and replicas in turn."""
    sizes, left, factor, turn = [1, 1], world_size, 2, 0
    while left > 1:
        if left % factor:
            factor += 1
            continue
        sizes[turn % 2] *= factor
        left //= factor
        turn += 1
    return PipeDataParallelTopology(*sizes)
