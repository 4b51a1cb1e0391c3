"""Joining a job: from a launcher's environment variables to a `ParallelContext`."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from megazero.config.tree.parallel import ParallelConfig
from megazero.errors import ConfigError, HostConfigError
from megazero.mpu.agreement import Facts, agree_by_notes
from megazero.mpu.communicators import CommunicatorPlan, second_communicators
from megazero.mpu.context import ParallelContext, make_context, solo_context
from megazero.mpu.grid import AXES, ProcessGrid, Ranks
from megazero.mpu.group import Group
from megazero.mpu.torch_group import TorchGroup, leave_world, open_group, start_world
from megazero.mpu.transports import backends
from megazero.mpu.waits import Waits
from megazero.mpu.warm_up import warm_up
from megazero.mpu.watch.group import watched
from megazero.mpu.watch.job_notes import StoreJobNotes, keeper_of_store
from megazero.mpu.watch.watch import Watch, WatchLimits
from megazero.mpu.wrapping_group import WrappingGroup

_LATER = timedelta(minutes=1)


@dataclass(frozen=True)
class Launch:
    """This process's place in the job, as the launcher (torchrun, SLURM with torchrun, or none) says.

    Attributes:
        rank, world_size: this process's number, and how many there are.
        local_rank: its number on its machine; None if several processes were started and nothing says it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0

    @property
    def speaks_for_node(self) -> bool:
        """Whether this process is the one that looks at what all processes of its machine share."""
        return not self.local_rank or self.rank == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; without them this is a job of one process.

        A script that is started by ``srun`` may set the first two by itself: then SLURM_LOCALID counts.

        Raises:
            ConfigError: a variable is not a number, or the rank lies outside the world.
        """
        environment = os.environ if environment is None else environment

        def read(*names: str) -> int | None:
            name = next((name for name in names if name in environment), None)
            if name is None:
                return None
            if not environment[name].isdigit():
                raise ConfigError(
                    f"the environment variable `{name}` must be a number, but is {environment[name]!r}"
                )
            return int(environment[name])

        rank, world_size = read("RANK") or 0, read("WORLD_SIZE")
        local_rank = read("LOCAL_RANK", "SLURM_LOCALID") if world_size else read("LOCAL_RANK") or 0
        launch = cls(rank, 1 if world_size is None else world_size, local_rank)
        if launch.rank >= launch.world_size:
            raise ConfigError(
                f"the environment variable `RANK` must be below WORLD_SIZE ({launch.world_size}), "
                f"but is {launch.rank}"
            )
        return launch


def choose_device(wanted: str, local_rank: int | None) -> torch.device:
    """This process's device: ``cuda`` means the device numbered `local_rank`, or the only one that it sees.

    A launcher may show each process one GPU of its own, as SLURM does with ``--gpus-per-task=1``. If it is
    one that all processes see, NCCL refuses it.

    Raises:
        ConfigError: CUDA was requested but is not available, there are fewer devices than local ranks, or
            there are several and nothing says which is this process's.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise HostConfigError("`device` must be cpu on a machine without CUDA, but is cuda; set --device cpu")
    count = torch.cuda.device_count()
    if count == 1:
        return torch.device("cuda", 0)
    if local_rank is None:
        raise ConfigError(
            f"the environment variable `LOCAL_RANK` must say which of {count} CUDA devices is this "
            "process's, but is not set; start ranks with `megazero launch`, torchrun or srun, or set it"
        )
    if local_rank >= count:
        raise ConfigError(
            f"`local rank` must be below the number of CUDA devices ({count}), but is {local_rank}; start "
            "fewer ranks per node or set --device cpu"
        )
    return torch.device("cuda", local_rank)


def choose_backend(wanted: str, device: torch.device) -> str:
    """The library that ranks talk through: ``auto`` means NCCL on CUDA, else Gloo.

    Raises:
        HostConfigError: NCCL was requested for ranks on the CPU, or from a torch that is built without it.
    """
    backend = ("nccl" if device.type == "cuda" else "gloo") if wanted == "auto" else wanted
    if backend == "nccl" and (device.type != "cuda" or backends()["nccl"] is None):
        have = f"torch {torch.__version__} has " + ("NCCL" if backends()["nccl"] else "no NCCL built in")
        raise HostConfigError(
            f"`distributed_backend` must be gloo or auto here, but is nccl, while {have} and this rank runs "
            f"on {device.type.upper()}; leave `--distributed-backend` out"
        )
    return backend


def join(
    config: ParallelConfig,
    launch: Launch,
    node_size: int = 1,
    facts: Callable[[], Facts] | None = None,
    *,
    zero_stage: int = 0,
) -> ParallelContext:
    """Join the job and open this rank's groups.

    Args:
        config: sizes of the axes, backend, device.
        launch: this process's rank, and the number of ranks.
        node_size: the number of replicas that the group ``node`` spans.
        facts: finds what all ranks must agree on before they open groups.
        zero_stage: what is sharded over the replicas, which decides on second communicators.

    Raises:
        ConfigError: the world does not factor into the configured axes, or the ranks disagree.
        CommunicationError: the other ranks could not be reached.
    """
    device = choose_device(config.device, launch.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    grid = grid_of(config, launch.world_size)
    if grid.world_size == 1:
        return solo_context(device)
    backend = choose_backend(config.distributed_backend, device)
    # The watch ends a call that takes too long and says why; the backend waits longer.
    patience = timedelta(minutes=config.distributed_timeout_minutes)
    seconds = second_communicators(grid, zero_stage) if backend == "nccl" else ()
    plan = CommunicatorPlan.of(grid, launch.rank, node_size=node_size, seconds=seconds)
    urgent = plan.named("world").urgent
    start_world(backend, launch.rank, launch.world_size, patience + _LATER, urgent=urgent)
    heartbeat = None if config.heartbeat_timeout_minutes is None else 60 * config.heartbeat_timeout_minutes
    job_notes = StoreJobNotes.of_world(
        keeper_of_store(), min(10.0, (heartbeat or patience.total_seconds()) / 4)
    )
    if facts is not None:
        agree_by_notes(job_notes, launch.rank, launch.world_size, facts(), patience.total_seconds())
    limits = WatchLimits(patience.total_seconds(), patience=heartbeat)
    new_mark = torch.cuda.Event if backend == "nccl" else None
    watch = Watch(job_notes, launch.rank, launch.world_size, limits, waits=Waits(device), new_mark=new_mark)

    def wrap(group: Group) -> Group:
        compared_on = torch.device("cpu") if group.name.startswith("host") else device
        return watched(group, watch, check_on=compared_on if config.check_collectives else None)

    context = open_context(config, launch, device, node_size=node_size, wrap=wrap, seconds=seconds)
    context = replace(context, watch=watch)
    if backend == "nccl":  # Gloo's groups connect when they are opened
        job_notes.post(_host_note(launch.rank), socket.gethostname())
        with reporting(context):
            warm_up(context, lambda rank: job_notes.read(_host_note(rank)))
    return context


def _host_note(rank: int) -> str:
    return f"host/{rank}"


def grid_of(config: ParallelConfig, world_size: int) -> ProcessGrid:
    """The grid with the configured axes; data parallelism takes what they leave.

    Raises:
        ConfigError: their sizes do not divide `world_size`.
    """
    sizes = {name: getattr(config, axis.setting) for name, axis in AXES.items() if axis.setting is not None}
    sizes["etp"] = sizes["etp"] or sizes["tp"]
    sizes["cp_inner"] = (config.hierarchical_context_parallel_sizes or (1, 1))[0]
    return ProcessGrid.factor(world_size, **sizes)


def open_context(
    config: ParallelConfig,
    launch: Launch,
    device: torch.device,
    *,
    node_size: int = 1,
    wrap: Callable[[Group], Group] = lambda group: group,
    seconds: Sequence[str] = (),
) -> ParallelContext:
    """The context of a rank that has joined the world.

    Args:
        config, launch, node_size: as for `join`.
        device: where this rank's tensors live.
        wrap: applied to each group when it is opened.
        seconds: the second communicators to open.
    """
    timeout = timedelta(minutes=config.distributed_timeout_minutes) + _LATER
    grid = grid_of(config, launch.world_size)
    plan = CommunicatorPlan.of(grid, launch.rank, node_size=node_size, seconds=seconds)

    def maker(name: str, ranks: Ranks) -> Group:
        planned = plan.named(name)
        return wrap(
            open_group(name, launch.rank, ranks, timeout, urgent=planned.urgent, second=planned.second)
        )

    def on_host(name: str, ranks: Ranks) -> Group:
        return wrap(open_group(name, launch.rank, ranks, timeout, backend="gloo"))

    nccl = choose_backend(config.distributed_backend, device) == "nccl"
    return make_context(
        grid,
        launch.rank,
        device,
        maker,
        node_size=node_size,
        seconds=seconds,
        host=on_host if nccl else None,
    )


def leave(context: ParallelContext) -> None:
    """Leave the job cleanly: wait for everyone, then close the groups."""
    if context.watch is not None:
        context.watch.leave()  # while the process that keeps the notes is sure to be there
    context.world.barrier()
    if context.watch is not None:
        context.watch.close()
    close_groups(context)
    leave_world()


def close_groups(context: ParallelContext) -> None:
    """Release what the groups hold outside Python."""
    for group in context.groups.values():
        if isinstance(group, (TorchGroup, WrappingGroup)):
            group.close()


@contextmanager
def reporting(context: ParallelContext) -> Iterator[None]:
    """Report an error raised in the block to the other ranks, so that they end too instead of waiting."""
    try:
        yield
    except BaseException as error:
        if context.watch is not None:
            context.watch.report(error)
            context.watch.close()
        raise
