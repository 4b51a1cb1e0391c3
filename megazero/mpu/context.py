"""`ParallelContext`: this rank's place in the grid and its communicators, passed explicitly.

There is no process-wide parallel state. A context can be passed to code that expects a DeepSpeed `mpu`
object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megazero.mpu.grid import COMMUNICATORS, Place, ProcessGrid
from megazero.mpu.group import Group
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.watch.watch import Watch


@dataclass(frozen=True)
class ParallelContext:
    """One rank's view of the job.

    `groups` holds one `Group` per name in `grid.COMMUNICATORS`, and four that are not products of axes:
    ``tied`` (the pipeline stages that hold a tied weight), ``node`` (replicas on one node), ``peers`` (those
    at the same place of each node) and ``host`` (all ranks, for tensors on the host). `watch` is the one that
    watches their calls, if there is one.
    """

    grid: ProcessGrid
    rank: int
    device: torch.device
    groups: Mapping[str, Group]
    watch: Watch | None = None

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
    def tied(self) -> Group:
        """The pipeline stages that hold a tied weight; at other stages, this rank alone."""
        return self.groups["tied"]

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


TIED_STAGES = (0, -1)
"""The pipeline stages that hold a tied weight: embedding and head."""

GroupMaker = Callable[[str, tuple[int, ...]], Group]


def make_context(
    grid: ProcessGrid,
    rank: int,
    device: torch.device,
    maker: GroupMaker,
    *,
    node_size: int = 1,
    host: GroupMaker | None = None,
) -> ParallelContext:
    """A context whose groups of more than one rank come from ``maker(name, ranks)``.

    ``host`` makes the group of that name where another one than the world's is needed.

    Communicators that span the same ranks share one group: a second communicator over them would only
    cost memory and connection time. `node_size` is the number of replicas that ``node`` spans.
    """
    spans = {name: grid.members(rank, axes) for name, axes in COMMUNICATORS.items()}
    spans |= {
        "tied": grid.at_stages(rank, TIED_STAGES),
        "node": grid.node(rank, node_size),
        "peers": grid.peers(rank, node_size),
    }
    groups: dict[str, Group] = {}
    opened: dict[tuple[int, ...], Group] = {}
    for name, ranks in spans.items():
        if ranks not in opened:
            opened[ranks] = SoloGroup(name, rank) if len(ranks) == 1 else maker(name, ranks)
        groups[name] = opened[ranks]
    world = groups["world"]
    groups["host"] = world if host is None or world.size == 1 else host("host", tuple(world.ranks))
    return ParallelContext(grid, rank, device, groups)


def solo_context(device: torch.device | str = "cpu") -> ParallelContext:
    """The context of a job of one process."""

    def never(name: str, ranks: tuple[int, ...]) -> Group:
        raise AssertionError(f"a world of one has no group {name} of {ranks}")

    return make_context(ProcessGrid(), 0, torch.device(device), never)


def thread_context(
    world: ThreadWorld, grid: ProcessGrid, rank: int, *, node_size: int = 1
) -> ParallelContext:
    """The context of one rank of a world of threads."""
    assert world.size == grid.world_size

    def maker(name: str, ranks: tuple[int, ...]) -> Group:
        return world.group(name, rank, ranks)

    return make_context(grid, rank, torch.device("cpu"), maker, node_size=node_size)
