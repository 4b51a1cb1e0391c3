"""Functions of `deepspeed.comm` that join, query and leave the world of ranks and its groups."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp, is_available, is_initialized
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.deepspeed.comm.log import LOG, report
from megazero.errors import ConfigError
from megazero.mpu.group import Group
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.torch_group import TorchGroup, leave_world, start_world
from megazero.mpu.wrapping_group import WrappingGroup

__all__ = ["ProcessGroup", "ReduceOp", "is_available", "is_initialized"]

AnyGroup = ProcessGroup | Group | None


def process_group(group: AnyGroup) -> ProcessGroup | None:
    """Torch's process group of a group's ranks; None stays None.

    Raises:
        ConfigError: the group has no process group, because its ranks are threads.
    """
    if not isinstance(group, Group):  # a process group, or torch's marker for a rank that is no member
        return group
    if isinstance(group, WrappingGroup):
        return process_group(group.inner)
    if isinstance(group, TorchGroup):
        return group.process_group
    if isinstance(group, SoloGroup) and is_initialized():
        return group_of_one(group)
    raise ConfigError(
        f"`group` must be a group of processes that have joined a world, but is {group.name}; call "
        "`init_distributed` first"
    )


def group_of_one(group: SoloGroup) -> ProcessGroup:
    """Torch's process group of this process alone, made when it is first used."""
    world = dist.group.WORLD
    assert world is not None
    if world.size() == 1:
        return world
    cache: dict[ProcessGroup, ProcessGroup] = vars(group).setdefault("_alone", {})
    if world not in cache:  # a world that was left and joined again needs a new group
        cache.clear()
        cache[world] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return cache[world]


def join_alone(backend: str, timeout: timedelta) -> None:
    """Join a world of this process alone, which needs no port."""
    start_world(backend, 0, 1, timeout, store=dist.HashStore())  # type: ignore[attr-defined]  # torch exports it without saying so


def require_world() -> None:
    """Raise ConfigError if the world has not been joined."""
    if not is_initialized():
        raise ConfigError(
            "`deepspeed.comm` must be asked after the world of ranks has been joined, but it has not; call "
            "`init_distributed` or `initialize` first"
        )


def get_rank(group: AnyGroup = None) -> int:
    """This process's rank in a group; -1 if it is no member."""
    require_world()
    return dist.get_rank(process_group(group))


def get_world_size(group: AnyGroup = None) -> int:
    """The number of ranks in a group; -1 if this process is no member."""
    require_world()
    return dist.get_world_size(process_group(group))


def get_local_rank() -> int:
    """This process's number on its host, from LOCAL_RANK."""
    require_world()
    return get_local_rank_from_launcher()


def get_global_rank(group: AnyGroup = None, group_rank: int = 0) -> int:
    """The world rank of a rank of a group."""
    require_world()
    return dist.get_global_rank(process_group(group) or get_world_group(), group_rank)


def get_all_ranks_from_group(group: AnyGroup = None) -> list[int]:
    """The world ranks of a group, in the group's order."""
    require_world()
    return list(dist.get_process_group_ranks(process_group(group)))


def get_world_group() -> ProcessGroup:
    """The group of all ranks."""
    require_world()
    world = dist.group.WORLD
    assert world is not None
    return world


def get_backend(group: AnyGroup = None) -> str:
    """The communication library of a group, such as gloo."""
    require_world()
    return str(dist.get_backend(process_group(group)))


def new_group(ranks: Sequence[int] | None = None) -> ProcessGroup:
    """Open a group of world ranks, all by default; every rank of the world calls this with the same ones."""
    require_world()
    group: ProcessGroup = dist.new_group(None if ranks is None else list(ranks))
    return group


def destroy_process_group(group: AnyGroup = None) -> None:
    """Leave a group; None leaves the world with all its groups."""
    if group is None:
        leave_world()
    else:
        dist.destroy_process_group(process_group(group))


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Open a device mesh of all ranks, with a group for each dim."""
    require_world()
    kind = get_accelerator().name()
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def enable_symm_mem_for_group(group_name: Any) -> None:
    """Enable torch's symmetric memory, by which CUDA ranks of a host access each other's memory."""
    require_world()
    from torch.distributed import _symmetric_memory

    _symmetric_memory.enable_symm_mem_for_group(group_name)


def has_feature() -> bool:
    """True, because every supported torch has the collectives that scripts ask about."""
    require_world()
    return True


def get_local_rank_from_launcher() -> int:
    """LOCAL_RANK, or the variable of MPI's launcher; 0 without a launcher."""
    return _number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", default=0)


def get_world_rank_from_launcher() -> int:
    """RANK, or the variable of MPI's launcher; 0 without a launcher."""
    return _number("RANK", "OMPI_COMM_WORLD_RANK", default=0)


def get_world_size_from_launcher() -> int:
    """WORLD_SIZE, or the variable of MPI's launcher; 1 without a launcher."""
    return _number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", default=1)


def _number(*names: str, default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


def configure(
    deepspeed_config: object = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Choose the calls to time; an argument of None changes nothing.

    Args:
        deepspeed_config: a DeepSpeed JSON as a dictionary, or a `DeepSpeedConfig`; its section
            ``comms_logger`` is applied if it is enabled.
        enabled, prof_all, prof_ops, verbose, debug: see `CommsLogger`; they override the section.
    """
    document = getattr(deepspeed_config, "_param_dict", deepspeed_config)
    section = document.get("comms_logger") if isinstance(document, Mapping) else None
    if section and section.get("enabled"):
        LOG.configure(section)
    changes = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose}
    for name, value in {**changes, "debug": debug}.items():
        if value is not None:
            setattr(LOG, name, value)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, object] | None:
    """Print the times of the calls so far, on rank 0; every rank calls this.

    Args:
        show_straggler: separate the time that a rank waits for slower ranks.
        return_dict: return the figures too, on every rank.
    """
    require_world()
    dist.barrier()
    figures = report(_min_over_ranks if show_straggler else None, show=dist.get_rank() == 0)
    dist.barrier()
    return figures if return_dict else None


def _min_over_ranks(times: list[float]) -> list[float]:
    least = torch.tensor(times, dtype=torch.float64, device=get_accelerator().current_device_name())
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.tolist()


def reset_log() -> None:
    """Forget the calls so far."""
    LOG.reset_data()


def has_comm_data() -> bool:
    """Whether a call has been timed."""
    return LOG.has_data()


def get_comm_operation_count() -> int:
    """The number of calls that were timed."""
    return LOG.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """The names of the calls that were timed."""
    return LOG.get_operation_names()
