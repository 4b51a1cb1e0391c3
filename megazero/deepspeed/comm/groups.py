"""`utils.groups`: this rank's place along each axis, in the layout that was last used in this process.

Before `initialize` all ranks are data-parallel. Groups are torch's, so that its own functions take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.deepspeed.comm.world import (
    get_all_ranks_from_group,
    get_rank,
    get_world_group,
    process_group,
    require_world,
)
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.group import Group
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.torch_group import joined_world


class _Layout:
    """The context of the last engine: functions without arguments have no other place for it."""

    def __init__(self) -> None:
        self._context: ParallelContext | None = None

    def remember(self, context: ParallelContext) -> None:
        """Make `context` the one that these getters read, until its world is destroyed."""
        self._context = context

    def context(self) -> ParallelContext | None:
        """The context, if its world is the one that this process is in."""
        if self._context is not None and joined_world() != (self._context.rank, self._context.world_size):
            self._context = None
        return self._context


LAYOUT = _Layout()


@dataclass(frozen=True)
class Axis:
    """The ranks along an axis that this one is among.

    Attributes:
        name: the name of our group.
        whole: whether these are all ranks as long as there is no layout; else this one alone.
    """

    name: str
    whole: bool = False

    def group(self, group_name: str | None = None) -> object:
        """Torch's group of these ranks.

        Args:
            group_name: of experts, ``ep_size_2`` for two ranks that share them.

        Raises:
            ConfigError: the world has not been joined, or experts are not shared by so many ranks.
        """
        require_world()
        own = self._own(group_name)
        if own is not None:
            return process_group(own)
        return get_world_group() if self.whole else _alone()

    def size(self, group_name: str | None = None) -> int:
        """The number of these ranks."""
        require_world()
        own = self._own(group_name)
        return own.size if own is not None else get_world_group().size() if self.whole else 1

    def rank(self, group_name: str | None = None) -> int:
        """This rank's place among them."""
        require_world()
        own = self._own(group_name)
        return own.rank if own is not None else get_rank() if self.whole else 0

    def ranks(self, group_name: str | None = None) -> list[int]:
        """Their world ranks."""
        require_world()
        own = self._own(group_name)
        return (
            list(own.ranks) if own is not None else get_all_ranks_from_group() if self.whole else [get_rank()]
        )

    def first(self, group_name: str | None = None) -> int:
        """The world rank of the first of them."""
        return self.ranks(group_name)[0]

    def _own(self, group_name: str | None) -> Group | None:
        context = LAYOUT.context()
        if group_name is not None:
            size = 1 if context is None else context.grid.ep
            if group_name != f"ep_size_{size}":
                raise ConfigError(
                    f"`group_name` must be ep_size_{size}, as {size} ranks share experts, but is "
                    f"{group_name}; build the MoE layers with that `ep_size` and call `initialize` first"
                )
        return None if context is None else context.groups[self.name]


def _alone() -> object:
    return process_group(SoloGroup("alone", get_rank()))


DATA = Axis("data", whole=True)
TENSOR = Axis("tp")
EXPERT_TENSOR = Axis("etp")
SEQUENCE = Axis("cp")
SEQUENCE_DATA = Axis("replica", whole=True)
EXPERTS = Axis("ep")
EXPERT_DATA = Axis("expert_replica", whole=True)
SECOND_PARTITION = Axis("node")


def largest_expert_size() -> int:
    """The number of ranks that share experts."""
    context = LAYOUT.context()
    return 1 if context is None else context.grid.ep


def largest_expert_name() -> str:
    """The name of the group that shares experts."""
    return f"ep_size_{largest_expert_size()}"


def expert_groups() -> dict[str, object]:
    """Name -> group of ranks that share experts."""
    return {largest_expert_name(): EXPERTS.group()}


def expert_data_groups() -> dict[str, object]:
    """Name -> group of ranks that hold the same experts."""
    return {largest_expert_name(): EXPERT_DATA.group()}


def expert_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks that share experts, and those that hold the same ones, in a world of this layout.

    Raises:
        ConfigError: the sizes do not divide the world, or experts are to be shared by ranks far apart.
    """
    if use_data_before_expert_parallel_:
        raise ConfigError(
            "`use_data_before_expert_parallel_` must be false, but is true; here the ranks that share "
            "experts are neighbours"
        )
    sizes = {"tp": tensor_parallel_size_, "pp": pipeline_parallel_size_, "ep": expert_parallel_size_}
    grid = ProcessGrid.factor(world_size, **sizes, etp=tensor_parallel_size_)
    stage = world_size // pipeline_parallel_size_

    def place(ranks: Sequence[int]) -> tuple[int, ...]:
        """DeepSpeed lists groups by stage, then by slice of the layers."""
        return ranks[0] // stage, ranks[0] % tensor_parallel_size_, ranks[0]

    shared, same = (sorted(grid.partition((axis,)), key=place) for axis in ("ep", "edp"))
    return [list(ranks) for ranks in shared], [list(ranks) for ranks in same]
