"""`find_context`: this rank's context in a script's job.

The script may have joined torch's world already, may pass an `mpu` object that describes the layout, or may
leave both to megazero.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType

import torch

from megazero.config.tree.parallel import ParallelConfig
from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.deepspeed.comm.groups import LAYOUT
from megazero.deepspeed.comm.mpu import DeepSpeedMpu
from megazero.deepspeed.comm.world import configure, join_alone
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch, choose_backend, choose_device, grid_of, open_context
from megazero.mpu.torch_group import TorchGroup, joined_world, leave_world, start_world
from megazero.mpu.warm_up import warm_up

TIMEOUT = timedelta(minutes=10)
# The variables of MPI's launcher.
_MPI = MappingProxyType(
    {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    }
)
_NOT_JOINED = (
    "`dist_init_required` must be true when the world of ranks has not been joined, but is false; call "
    "`init_distributed` first or leave the argument out"
)
_MPI_HOSTS = ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")


def find_context(
    mpu: object = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    node_size: int = 1,
    ep_size: int = 1,
    may_start: bool = True,
) -> ParallelContext:
    """This rank's context in the world that torch has joined, or else in that of the launcher's environment.

    Args:
        mpu: a `ParallelContext` or `DeepSpeedMpu`, whose context is returned; an object with methods such as
            ``get_model_parallel_world_size`` and ``get_data_parallel_rank``, whose layout is adopted; or
            None for data-parallel ranks alone.
        backend: nccl or gloo; by default it follows from the device.
        timeout: the longest wait in one collective; by default see `default_timeout`.
        node_size: the number of replicas in the group ``node``.
        ep_size: the expert-parallel size.
        may_start: whether to join the world if the script has not.

    Raises:
        ConfigError: `mpu` places this rank differently (tensor-parallel ranks must be adjacent), `ep_size`
            does not divide the data-parallel size, or the world has not been joined and `may_start` is
            false.
        CommunicationError: the other ranks could not be reached.
    """
    if isinstance(mpu, DeepSpeedMpu):
        mpu = mpu.context
    if isinstance(mpu, ParallelContext):
        LAYOUT.remember(mpu)
        return mpu
    timeout = timeout or default_timeout()
    launch = _launch()
    device = _device(launch)
    config = ParallelConfig.model_validate(
        {
            **_sizes(mpu),
            "distributed_backend": backend or "auto",
            "distributed_timeout_minutes": timeout.total_seconds() / 60,
        }
    )
    dense = grid_of(config, launch.world_size)  # refuses bad sizes before anything is joined
    replicas = dense.dp * dense.cp
    if replicas % ep_size:
        raise ConfigError(
            f"`ep_size` must divide the number of data-parallel ranks ({replicas}), but is {ep_size}; choose "
            "a divisor or start other ranks"
        )
    config = config.model_copy(update={"expert_model_parallel_size": ep_size})
    if joined_world() is None:
        if may_start:
            _join(launch, device, backend, timeout)
        elif launch.world_size > 1:
            raise ConfigError(_NOT_JOINED)
    context = open_context(config, launch, device, node_size=node_size)
    if choose_backend(config.distributed_backend, device) == "nccl":  # Gloo's groups connect when opened
        warm_up(context)
    _compare(mpu, context)
    LAYOUT.remember(context)
    return context


def default_timeout() -> timedelta:
    """The longest wait in one collective: DEEPSPEED_TIMEOUT minutes, or 10.

    Raises:
        ConfigError: the variable is no positive number.
    """
    text = os.environ.get("DEEPSPEED_TIMEOUT", "")
    if not text:
        return TIMEOUT
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise ConfigError(
            f"the environment variable `DEEPSPEED_TIMEOUT` must be a number of minutes above 0, but is "
            f"{text!r}; correct it or unset it"
        )
    return timedelta(minutes=minutes)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the world of ranks that the launcher's environment describes, unless it has been joined.

    Without a launcher it is a world of one; RANK, WORLD_SIZE and LOCAL_RANK are set.

    Args:
        dist_backend: nccl or gloo; by default it follows from the device.
        auto_mpi_discovery: whether to read the variables of MPI's launcher if torch's are missing.
        distributed_port: the port of rank 0, if MASTER_PORT is not set.
        verbose: has no effect; the logger's level decides.
        timeout: the longest wait in one collective; by default see `default_timeout`.
        init_method: the rendezvous, as in torch's ``init_process_group``.
        dist_init_required: False refuses to join.
        config: a DeepSpeed JSON as a dictionary; its section ``comms_logger`` is applied.
        rank, world_size: override the launcher's.

    Raises:
        ConfigError: joining is refused, or the environment lacks the address of rank 0.
        CommunicationError: the other ranks could not be reached.
    """
    configure(config)
    if joined_world() is not None:
        return
    if dist_init_required is False:
        raise ConfigError(_NOT_JOINED)
    environment = _environment(auto_mpi_discovery)
    if rank >= 0:
        environment["RANK"] = str(rank)
    if world_size > 0:
        environment["WORLD_SIZE"] = str(world_size)
    launch = Launch.from_environment(environment)
    if launch.world_size > 1 and init_method is None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    _join(launch, _device(launch), dist_backend, timeout or default_timeout(), init_method)
    for name in _MPI:
        os.environ.setdefault(name, str(getattr(launch, name.lower())))


def _environment(mpi: bool = True) -> dict[str, str]:
    """The environment, in which the variables of MPI's launcher stand in for missing ones of torch's."""
    environment = dict(os.environ)
    if mpi:
        for name, mpi_name in _MPI.items():
            if mpi_name in environment:
                environment.setdefault(name, environment[mpi_name])
    return environment


def _launch() -> Launch:
    """This process's rank and world size in torch's world if it is joined, or else by the launcher."""
    joined = joined_world()
    launch = Launch.from_environment(_environment())
    return launch if joined is None else Launch(*joined, launch.local_rank)


def _device(launch: Launch) -> torch.device:
    """Choose this process's device, and make it CUDA's current device."""
    wanted = "auto" if get_accelerator().name() == "cuda" else "cpu"
    device = choose_device(wanted, launch.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _join(
    launch: Launch,
    device: torch.device,
    backend: str | None,
    timeout: timedelta,
    init_method: str | None = None,
) -> None:
    """Join the world, and leave it when the process ends."""
    if backend == "nccl" and device.type == "cpu":
        raise ConfigError(
            "`dist_backend` must be gloo for ranks on the CPU, but is nccl; leave it out, then the "
            "device decides"
        )
    backend = backend or get_accelerator().communication_backend_name()
    if init_method is not None:
        start_world(backend, launch.rank, launch.world_size, timeout, init_method=init_method)
    elif launch.world_size == 1:
        join_alone(backend, timeout)
    else:
        _find_first_rank(os.environ, launch)
        start_world(backend, launch.rank, launch.world_size, timeout)
    atexit.unregister(leave_at_exit)  # once, however often the world is joined
    atexit.register(leave_at_exit)


def leave_at_exit() -> None:
    """Close every group and leave the world, as scripts seldom do.

    Otherwise the threads of a group that is still referenced outlive the interpreter, which made about one
    finished job in ten abort. After an error nothing is closed, because other ranks may never answer.
    """
    if hasattr(sys, "last_type"):
        return
    for group in (value for value in gc.get_objects() if type(value) is TorchGroup):
        group.close()
    leave_world()


def _find_first_rank(environment: Mapping[str, str], launch: Launch) -> None:
    """Set MASTER_ADDR and MASTER_PORT if MPI's launcher has not set them."""
    if "MASTER_ADDR" not in environment:
        place = next((environment[name] for name in _MPI_HOSTS if name in environment), None)
        if place is None and environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(launch.world_size):
            place = "127.0.0.1"
        if place is None:
            raise ConfigError(
                f"the environment variable `MASTER_ADDR` must name the host of rank 0 for "
                f"{launch.world_size} ranks, but is not set; start them with torchrun or set it"
            )
        host, _, port = place.partition(":")
        os.environ["MASTER_ADDR"] = host
        os.environ.setdefault("MASTER_PORT", port or "29500")
    os.environ.setdefault("MASTER_PORT", "29500")


def _call_first(mpu: object, *names: str) -> int | None:
    """Call the first of these methods that `mpu` has; None if it has none."""
    for name in names:
        method = getattr(mpu, name, None)
        if callable(method):
            return int(method())
    return None


def _sizes(mpu: object) -> dict[str, int]:
    """The sizes that `mpu` has methods for, by the names of our settings."""
    methods = {
        "tensor_model_parallel_size": (
            "get_tensor_model_parallel_world_size",
            "get_model_parallel_world_size",
        ),
        "pipeline_model_parallel_size": (
            "get_pipeline_model_parallel_world_size",
            "get_pipe_parallel_world_size",
        ),
        "context_parallel_size": ("get_sequence_parallel_world_size",),
    }
    return {axis: size for axis, names in methods.items() if (size := _call_first(mpu, *names)) is not None}


def _compare(mpu: object, context: ParallelContext) -> None:
    """Raise ConfigError if a rank of `mpu` differs from that of our grid."""
    methods = {
        "tensor": ("tp", "get_tensor_model_parallel_rank", "get_model_parallel_rank"),
        "sequence": ("cp", "get_sequence_parallel_rank"),
        "data": ("data", "get_data_parallel_rank"),
    }
    for what, (group, *names) in methods.items():
        rank, ours = _call_first(mpu, *names), context.groups[group].rank
        if rank not in (None, ours):
            raise ConfigError(
                f"`mpu` must lay ranks out with tensor-parallel ranks adjacent, so that rank {context.rank} "
                f"has {what}-parallel rank {ours}, but it says {rank}; use Megatron's order tp-dp-pp"
            )
