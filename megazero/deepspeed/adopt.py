"""Finding this rank's place in a job that a training script may have started itself.

A script may have joined torch's world already, may bring an `mpu` object of its own (DeepSpeed's contract),
or may leave everything to megazero.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from megazero.config.tree.parallel import ParallelConfig
from megazero.deepspeed.mpu import DeepSpeedMpu
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch, choose_device, grid_of, open_context
from megazero.mpu.torch_group import joined_world, start_world

TIMEOUT = timedelta(minutes=10)


def find_context(
    mpu: Any = None,
    *,
    backend: str | None = None,
    timeout: timedelta = TIMEOUT,
    node_size: int = 1,
    ep_size: int = 1,
    may_start: bool = True,
) -> ParallelContext:
    """This rank's context, from the world that torch has joined, or else from the launcher's environment.

    Args:
        mpu: a `ParallelContext`, wrapped in a `DeepSpeedMpu` or not, which is returned as it is; or an object
            with methods such as ``get_model_parallel_rank`` and ``get_data_parallel_world_size``, whose
            layout is adopted; or None, in which case all ranks are data-parallel.
        backend: nccl or gloo; by default the device decides.
        timeout: the longest wait in one collective.
        node_size: the number of replicas that ``node`` spans.
        ep_size: how many data-parallel ranks share the experts of a layer.
        may_start: whether to join the world if the script has not.

    Raises:
        ConfigError: the layout of `mpu` is not the one used here (tensor-parallel ranks adjacent), `ep_size`
            does not divide the data-parallel ranks, or the world has not been joined and `may_start` is
            false.
        CommunicationError: the other ranks could not be reached.
    """
    if isinstance(mpu, ParallelContext):
        return mpu
    if isinstance(mpu, DeepSpeedMpu):
        return mpu.context
    joined, launch = joined_world(), _launch()
    device = choose_device("auto", launch.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = ParallelConfig.model_validate(
        {
            **_sizes(mpu),
            "distributed_backend": backend or "auto",
            "distributed_timeout_minutes": timeout.total_seconds() / 60,
        }
    )
    dense = grid_of(config, launch.world_size)  # raises before anything is joined
    replicas = dense.dp * dense.cp
    if replicas % ep_size:
        raise ConfigError(
            f"`ep_size` must divide the number of data-parallel ranks ({replicas}), but is {ep_size}; choose "
            "a divisor or start other ranks"
        )
    config = config.model_copy(update={"expert_model_parallel_size": ep_size})
    if launch.world_size > 1 and joined is None:
        if not may_start:
            raise ConfigError(
                "`dist_init_required` must be true when the world of ranks has not been joined, but is "
                "false; call `init_distributed` first or leave the argument out"
            )
        default = "nccl" if device.type == "cuda" else "gloo"
        start_world(backend or default, launch.rank, launch.world_size, timeout)
    context = open_context(config, launch, device, node_size=node_size)
    _compare(mpu, context)
    return context


def _launch() -> Launch:
    """This process's place according to torch, or else according to the launcher."""
    joined = joined_world()
    if joined is None:
        return Launch.from_environment()
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return Launch(*joined, int(local_rank) if local_rank.isdigit() else 0)


def _ask(mpu: Any, *names: str) -> int | None:
    """The result of the first of these methods that `mpu` has, or None if it has none of them."""
    for name in names:
        method = getattr(mpu, name, None)
        if callable(method):
            return int(method())
    return None


def _sizes(mpu: Any) -> dict[str, int]:
    """The sizes that `mpu` reports, under our names; axes that it does not report are left out."""
    asked = {
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
    return {axis: size for axis, names in asked.items() if (size := _ask(mpu, *names)) is not None}


def _compare(mpu: Any, context: ParallelContext) -> None:
    """Raise ConfigError if `mpu` does not place this rank where our grid does."""
    asked = {
        "tensor": ("tp", "get_tensor_model_parallel_rank", "get_model_parallel_rank"),
        "data": ("data", "get_data_parallel_rank"),
    }
    for what, (group, *names) in asked.items():
        theirs, ours = _ask(mpu, *names), context.groups[group].rank
        if theirs not in (None, ours):
            raise ConfigError(
                f"`mpu` must lay ranks out with tensor-parallel ranks adjacent, so that rank {context.rank} "
                f"has {what}-parallel rank {ours}, but it says {theirs}; use Megatron's order tp-dp-pp"
            )
