"""`ParallelContext`: this rank's place in the grid and its communicators, passed explicitly.

There is no process-wide parallel state. A context can be passed to code that expects a DeepSpeed `mpu`
object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megazero.mpu.communicators import CommunicatorPlan
from megazero.mpu.grid import Place, ProcessGrid, Ranks
from megazero.mpu.group import Group
from megazero.mpu.linked_group import LinkedGroup
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.streams import INLINE, Streams, streams_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.tree import tiers
from megazero.mpu.watch.watch import Watch


@dataclass(frozen=True)
class ParallelContext:
    """One rank's view of the job.

    `groups` holds one `Group` per name in `grid.COMMUNICATORS`, and four that are not products of axes:
    ``tied`` (the pipeline stages that hold a tied weight), ``node`` (replicas on one node), ``peers`` (those
    at the same place of each node) and ``host`` (see `host_groups`). Second communicators
    (`CommunicatorPlan`) are there where they were asked for. `plan` says what each is for. `watch` is the one
    that watches their calls, if there is one. `streams` are those of the device.
    """

    grid: ProcessGrid
    rank: int
    device: torch.device
    groups: Mapping[str, Group]
    plan: CommunicatorPlan
    watch: Watch | None = None
    streams: Streams = INLINE

    @property
    def place(self) -> Place:
        """This rank's place along each axis."""
        return self.grid.place(self.rank)

    @property
    def tp(self) -> Group:
        """Ranks that hold the other slices of the layers' weights."""
        return self.groups["tp"]

    @property
    def pp(self) -> Group:
        """Ranks that hold the other stages of the pipeline."""
        return self.groups["pp"]

    @property
    def data(self) -> Group:
        """Ranks that read different samples."""
        return self.groups["data"]

    @property
    def batch(self) -> Group:
        """Ranks that together read one whole global batch: totals of a batch are summed over them."""
        return self.groups["batch"]

    @property
    def replica(self) -> Group:
        """Ranks that hold the same dense parameters."""
        return self.groups["replica"]

    @property
    def node(self) -> Group:
        """Replicas on one node, which hold a second partition of the parameters (hpZ)."""
        return self.groups["node"]

    @property
    def peers(self) -> Group:
        """Replicas at the same place of each node, this rank's: one per node."""
        return self.groups["peers"]

    @property
    def model(self) -> Group:
        """Ranks that together hold one whole model: its stages, its slices and its experts."""
        return self.groups["model"]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.groups["world"]

    @property
    def world_size(self) -> int:
        return self.grid.world_size


def host_groups(context: ParallelContext) -> tuple[Group, ...]:
    """The groups for tensors on the host: reducing over one after the other reduces over all ranks.

    Over Gloo a rank holds a connection to each other member, and all ranks would be too many.
    """
    return tuple(group for name, group in context.groups.items() if name.startswith("host"))


GroupMaker = Callable[[str, Ranks], Group]


def make_context(
    grid: ProcessGrid,
    rank: int,
    device: torch.device,
    maker: GroupMaker,
    *,
    node_size: int = 1,
    seconds: Sequence[str] = (),
    host: GroupMaker | None = None,
) -> ParallelContext:
    """A context whose groups of more than one rank come from ``maker(name, ranks)``.

    Args:
        grid, rank, node_size, seconds: as for `CommunicatorPlan.of`.
        device: where this rank's tensors live.
        maker: opens a communicator.
        host: opens the groups ``host``, where another one than the world's is needed.
    """
    plan = CommunicatorPlan.of(grid, rank, node_size=node_size, seconds=seconds)
    groups: dict[str, Group] = {}
    if host is not None and grid.world_size > 1:  # first, as all ranks open them: see `CommunicatorPlan.of`
        for number, members in enumerate(tiers(rank, grid.world_size)):
            name = f"host_{number}" if number else "host"
            groups[name] = host(name, members)
    for communicator in plan.communicators:
        name, ranks = communicator.name, communicator.ranks
        group = SoloGroup(name, rank) if len(ranks) == 1 else maker(name, ranks)
        groups |= dict.fromkeys(communicator.names, group)
    if (odd := groups.pop("pp_odd", None)) is not None and odd.size > 1:
        groups["pp"] = LinkedGroup(groups["pp"], odd)
    groups.setdefault("host", groups["world"])
    return ParallelContext(grid, rank, device, groups, plan, streams=streams_of(device))


def with_whole_sequences(context: ParallelContext) -> ParallelContext:
    """The same context, where no rank shares a sequence with another: each of ``cp`` computes it whole."""
    alone = SoloGroup("cp", context.rank)
    return replace(context, groups={**context.groups, "cp": alone, "sequence": context.tp})


def solo_context(device: torch.device | str = "cpu") -> ParallelContext:
    """The context of a job of one process."""

    def never(name: str, ranks: Ranks) -> Group:
        raise AssertionError(f"a world of one has no group {name} of {ranks}")

    return make_context(ProcessGrid(), 0, torch.device(device), never)


def thread_context(
    world: ThreadWorld, grid: ProcessGrid, rank: int, *, node_size: int = 1, seconds: Sequence[str] = ()
) -> ParallelContext:
    """The context of one rank of a world of threads."""
    assert world.size == grid.world_size

    def maker(name: str, ranks: Ranks) -> Group:
        return world.group(name, rank, ranks)

    return make_context(grid, rank, torch.device("cpu"), maker, node_size=node_size, seconds=seconds)
