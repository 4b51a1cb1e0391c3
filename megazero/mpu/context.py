"""`ParallelContext`: this rank's place in the grid and its communicators, passed explicitly.

There is no process-wide parallel state. The context also answers the method names by which DeepSpeed
asks a Megatron `mpu` object, so it can be handed to code written for that contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megazero.mpu.grid import COMMUNICATORS, Coordinate, ProcessGrid
from megazero.mpu.group import Group
from megazero.mpu.recording_group import RecordingGroup, TrafficLog
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld


@dataclass(frozen=True)
class ParallelContext:
    """One rank's view of the job.

    `groups` holds one `Group` per name of `grid.COMMUNICATORS`, and two that are no product of axes: ``ends``
    (the first and the last pipeline stage) and ``node`` (replicas on one node).
    """

    grid: ProcessGrid
    rank: int
    device: torch.device
    groups: Mapping[str, Group]

    @property
    def place(self) -> Coordinate:
        return self.grid.coordinate(self.rank)

    @property
    def tp(self) -> Group:
        return self.groups["tp"]

    @property
    def pp(self) -> Group:
        return self.groups["pp"]

    @property
    def cp(self) -> Group:
        return self.groups["cp"]

    @property
    def ep(self) -> Group:
        return self.groups["ep"]

    @property
    def data(self) -> Group:
        """Ranks that read different samples."""
        return self.groups["data"]

    @property
    def replica(self) -> Group:
        """Ranks that hold the same dense parameters."""
        return self.groups["replica"]

    @property
    def ends(self) -> Group:
        """The first and the last pipeline stage, which hold a tied embedding; between, this rank."""
        return self.groups["ends"]

    @property
    def node(self) -> Group:
        """Replicas on one node, which hold a second partition of the parameters (hpZ)."""
        return self.groups["node"]

    @property
    def model(self) -> Group:
        """Ranks that together hold one model."""
        return self.groups["model"]

    @property
    def world(self) -> Group:
        return self.groups["world"]

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    # The mpu contract of DeepSpeed (deepspeed.initialize(mpu=...)).

    def get_model_parallel_rank(self) -> int:
        return self.tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self.tp.size

    def get_model_parallel_group(self) -> Group:
        return self.tp

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self.data.size

    def get_data_parallel_group(self) -> Group:
        return self.data

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.pp.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.pp.size

    def get_pipeline_model_parallel_group(self) -> Group:
        return self.pp

    def get_sequence_parallel_rank(self) -> int:
        return self.cp.rank

    def get_sequence_parallel_world_size(self) -> int:
        return self.cp.size

    def get_sequence_parallel_group(self) -> Group:
        return self.cp


GroupMaker = Callable[[str, tuple[int, ...]], Group]


def make_context(
    grid: ProcessGrid, rank: int, device: torch.device, maker: GroupMaker, *, node_size: int = 1
) -> ParallelContext:
    """A context whose groups of more than one rank come from ``maker(name, ranks)``.

    Communicators that span the same ranks share one group: a second communicator over them would only
    cost memory and connection time. `node_size` is the number of replicas that ``node`` spans.
    """
    spans = {name: grid.members(rank, axes) for name, axes in COMMUNICATORS.items()}
    spans |= {"ends": grid.ends(rank), "node": grid.node(rank, node_size)}
    groups: dict[str, Group] = {}
    opened: dict[tuple[int, ...], Group] = {}
    for name, ranks in spans.items():
        if ranks not in opened:
            opened[ranks] = SoloGroup(name, rank) if len(ranks) == 1 else maker(name, ranks)
        groups[name] = opened[ranks]
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


def recording_context(
    grid: ProcessGrid,
    rank: int,
    log: TrafficLog,
    device: torch.device | str = "meta",
    *,
    node_size: int = 1,
) -> ParallelContext:
    """The context of one rank of a job that does not run: its groups only count."""

    def maker(name: str, ranks: tuple[int, ...]) -> Group:
        return RecordingGroup(name, ranks.index(rank), ranks, log)

    return make_context(grid, rank, torch.device(device), maker, node_size=node_size)
