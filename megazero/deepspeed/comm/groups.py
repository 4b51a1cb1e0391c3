"""`utils.groups`: this rank's groups along each axis of the layout.

The layout is that of the context that was last made in this process; before, all ranks are data-parallel.
Groups are torch's process groups, for its own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.deepspeed.comm.collectives import all_to_all_single
from megazero.deepspeed.comm.world import (
    AnyGroup,
    get_all_ranks_from_group,
    get_rank,
    get_world_group,
    process_group,
    require_world,
)
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.group import DONE, Group, Work
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.torch_group import TorchGroup, adopted_group, joined_world
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup


class _LastContext:
    """The context that was last made in this process, for getters without arguments."""

    def __init__(self) -> None:
        self._context: ParallelContext | None = None

    def remember(self, context: ParallelContext) -> None:
        """Make `context` the one that these getters read, until its world is destroyed."""
        self._context = context

    def context(self) -> ParallelContext | None:
        """The context; None if there is none, or if its world has been left."""
        if self._context is not None and joined_world() != (self._context.rank, self._context.world_size):
            self._context = None
        return self._context


LAYOUT = _LastContext()


@dataclass(frozen=True)
class GroupAxis:
    """The group of this rank along one axis of the layout.

    Attributes:
        name: the name of the group in a context.
        whole: whether the group is the world before there is a layout; otherwise it is this rank alone.
    """

    name: str
    whole: bool = False

    def group(self, group_name: str | None = None) -> object:
        """Torch's process group.

        Args:
            group_name: of experts, such as ``ep_size_2`` for an expert-parallel size of 2.

        Raises:
            ConfigError: the world has not been joined, or the expert-parallel size is another.
        """
        require_world()
        own = self._own(group_name)
        if own is not None:
            return process_group(own)
        return get_world_group() if self.whole else process_group(SoloGroup("alone", get_rank()))

    def size(self, group_name: str | None = None) -> int:
        """The number of ranks in the group."""
        return len(self.ranks(group_name))

    def rank(self, group_name: str | None = None) -> int:
        """This rank within the group."""
        return self.ranks(group_name).index(get_rank())

    def ranks(self, group_name: str | None = None) -> list[int]:
        """The world ranks of the group."""
        require_world()
        own = self._own(group_name)
        if own is not None:
            return list(own.ranks)
        return get_all_ranks_from_group() if self.whole else [get_rank()]

    def first(self, group_name: str | None = None) -> int:
        """The world rank of the group's first rank."""
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


DATA = GroupAxis("data", whole=True)
TENSOR = GroupAxis("tp")
EXPERT_TENSOR = GroupAxis("etp")
SEQUENCE = GroupAxis("cp")
SEQUENCE_DATA = GroupAxis("replica", whole=True)
EXPERTS = GroupAxis("ep")
EXPERT_DATA = GroupAxis("expert_replica", whole=True)
SECOND_PARTITION = GroupAxis("node")


def largest_expert_size() -> int:
    """The expert-parallel size."""
    context = LAYOUT.context()
    return 1 if context is None else context.grid.ep


def largest_expert_name() -> str:
    """The name of the expert-parallel group."""
    return f"ep_size_{largest_expert_size()}"


def expert_groups() -> dict[str, object]:
    """Name -> the expert-parallel group."""
    return {largest_expert_name(): EXPERTS.group()}


def expert_data_groups() -> dict[str, object]:
    """Name -> the group of ranks that hold the same experts."""
    return {largest_expert_name(): EXPERT_DATA.group()}


def expert_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """The expert-parallel groups, and the groups that hold the same experts, in a world of this layout.

    Raises:
        ConfigError: the sizes do not divide the world, or `use_data_before_expert_parallel_` is set.
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
        """DeepSpeed's order of groups: by stage, then by tensor-parallel rank."""
        return ranks[0] // stage, ranks[0] % tensor_parallel_size_, ranks[0]

    shared, same = (sorted(grid.partition((axis,)), key=place) for axis in ("ep", "edp"))
    return [list(ranks) for ranks in shared], [list(ranks) for ranks in same]


class LoggedGroup(WrappingGroup):
    """A group whose all-to-alls are calls of `all_to_all_single`, which counts and times them."""

    def _collective(self, call: GroupCall) -> Work:
        if call.operation != "all_to_all":
            return super()._collective(call)
        output, tensor, *splits = call.arguments
        received, sent = (None if sizes is None else list(sizes) for sizes in splits)
        return all_to_all_single(output, tensor, received, sent, self.inner, call.async_op) or DONE


def logged_group(group: AnyGroup) -> Group:
    """Wrap a group in a `LoggedGroup`; None is the world.

    Raises:
        ConfigError: no world has been joined.
    """
    if isinstance(group, Group):
        return LoggedGroup(group) if isinstance(group, TorchGroup) else group
    require_world()
    return LoggedGroup(adopted_group(group or get_world_group()))
