"""A group over torch.distributed (NCCL or Gloo). This file handles the names that torch has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.errors import CommunicationError
from megazero.mpu.attempt_store import agent_store, store_of_attempt
from megazero.mpu.grid import Ranks
from megazero.mpu.group import DONE, Group, Reduction, Transfer, Work
from megazero.mpu.interfaces import choose_interface
from megazero.mpu.messages import name_ranks

# torch 2.13 renamed the two single-tensor collectives and deprecated the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = MappingProxyType({"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN})


class TorchGroup(Group):
    """A communicator backed by a torch process group.

    Args:
        name: the communicator's name in logs and errors.
        world_rank: this process's rank in the world.
        ranks: the members' world ranks, in group order.
        process_group: the torch process group of exactly these ranks.
    """

    def __init__(self, name: str, world_rank: int, ranks: Ranks, process_group: dist.ProcessGroup):
        self.name = name
        self.rank = ranks.index(world_rank)
        self.ranks = ranks
        self.process_group: dist.ProcessGroup | None = process_group  # None once closed

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Work:
        return self._call("all_reduce", dist.all_reduce, tensor, op=_OPS[op], async_op=async_op)

    def all_gather(self, output: Tensor, tensor: Tensor, *, async_op: bool = False) -> Work:
        return self._call("all_gather", _all_gather, output, tensor, async_op=async_op)

    def reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        return self._call("reduce_scatter", _reduce_scatter, output, tensor, op=_OPS[op], async_op=async_op)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        splits = (output_splits and list(output_splits), input_splits and list(input_splits))
        return self._call("all_to_all", dist.all_to_all_single, output, tensor, *splits, async_op=async_op)

    def broadcast(self, tensor: Tensor, source: int, *, async_op: bool = False) -> Work:
        return self._call("broadcast", dist.broadcast, tensor, src=self.ranks[source], async_op=async_op)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        if not transfers:
            return []
        # NCCL matches messages from one peer by order alone, Gloo by tag too, so both are given.
        order = sorted(range(len(transfers)), key=lambda i: (transfers[i].tag, transfers[i].peer))
        operations = [
            dist.P2POp(
                dist.isend if t.kind == "send" else dist.irecv,
                t.tensor,
                self.ranks[t.peer],
                group=self.process_group,
                tag=t.tag,
            )
            for t in (transfers[i] for i in order)
        ]
        try:
            works: Sequence[Work] = dist.batch_isend_irecv(operations)
        except (RuntimeError, ValueError) as error:
            raise self._failure("exchange", error) from error
        if len(works) != len(order):  # NCCL gives one work for the whole batch
            return [*works] * len(order)
        return [work for _, work in sorted(zip(order, works, strict=True), key=lambda pair: pair[0])]

    def barrier(self) -> None:
        on_cuda = dist.get_backend(self.process_group) == "nccl"  # which would guess the device, and warn
        which = {"device_ids": [torch.cuda.current_device()]} if on_cuda else {}
        self._call("barrier", dist.barrier, **which)

    def close(self) -> None:
        """Drop the process group, so that leaving the world ends its threads right away.

        Otherwise anything that still holds this object (a hook, a closure) would keep them running until the
        interpreter exits, and torch may then abort because of them.
        """
        self.process_group = None

    def _call(self, what: str, collective: Callable[..., Work | None], *args: object, **more: object) -> Work:
        try:
            work = collective(*args, group=self.process_group, **more)
        except (RuntimeError, ValueError) as error:
            raise self._failure(what, error) from error
        return DONE if work is None else work

    def _failure(self, what: str, error: Exception) -> CommunicationError:
        return CommunicationError(
            f"`{what}` over group `{self.name}` ({name_ranks(self.ranks)}) failed on rank "
            f"{self.ranks[self.rank]}: {error}"
        )


def adopted_group(process_group: dist.ProcessGroup) -> TorchGroup:
    """A process group that a script has made."""
    return TorchGroup(
        "adopted", dist.get_rank(), tuple(dist.get_process_group_ranks(process_group)), process_group
    )


def joined_world() -> tuple[int, int] | None:
    """This process's rank in torch's world and the world's size; None if it has joined none."""
    joined = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if joined else None


def start_world(
    backend: str, rank: int, world_size: int, timeout: timedelta, *, urgent: bool = False, **where: Any
) -> None:
    """Join the world.

    Args:
        backend, rank, world_size, timeout: as for `torch.distributed.init_process_group`.
        urgent: as for `open_group`.
        where: torch's init_method, store or device_id; by default the environment decides.

    Raises:
        CommunicationError: the other ranks could not be reached.
    """
    try:
        if not where:
            choose_interface(os.environ)
        kept = None if where else agent_store(timeout)
        if kept is not None:
            where["store"] = store_of_attempt(kept, rank, world_size, timeout)
        options = _stream_options(timeout) if urgent and backend == "nccl" else None
        dist.init_process_group(
            backend, rank=rank, world_size=world_size, timeout=timeout, pg_options=options, **where
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {rank} of {world_size} could not join the {backend} world: {error}"
        ) from error


def join_file_world(path: str, rank: int, world_size: int, timeout: timedelta) -> None:
    """Join a Gloo world of processes on one host that find each other through a file."""
    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]  # torch exports it without saying so
    start_world("gloo", rank, world_size, timeout, store=store)


def open_group(
    name: str,
    world_rank: int,
    ranks: Ranks,
    timeout: timedelta,
    *,
    urgent: bool = False,
    second: bool = False,
    backend: str | None = None,
) -> TorchGroup:
    """Open the group of `ranks`. Only its members need to call this.

    Args:
        name: the communicator's name.
        world_rank: this process's rank.
        ranks: the members' world ranks, in group order.
        timeout: how long a call may take.
        urgent: whether NCCL gives its stream a high priority, so that its kernels get the first free
            multiprocessor. If the group is that of all ranks, `start_world` has decided that.
        second: whether it is a second group over ranks that have one already.
        backend: its own backend, if it is not the world's.
    """
    if len(ranks) == dist.get_world_size() and not second and backend is None:
        world = dist.group.WORLD
        assert world is not None, "the world has not been joined"
        return TorchGroup(name, world_rank, ranks, world)
    options = _stream_options(timeout) if urgent and (backend or dist.get_backend()) == "nccl" else None
    with _unbound_world():
        handle = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=name,
        )
    return TorchGroup(name, world_rank, ranks, handle)


@contextmanager
def _unbound_world() -> Iterator[None]:
    """A context in which the world is not bound to a device, even if a script has joined it with one.

    In a bound world torch opens groups by splitting its communicator, in which every rank must take part,
    whereas here only a group's members open it.
    """
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _stream_options(timeout: timedelta) -> object:
    """NCCL's options with a stream of high priority; a torch without NCCL has none, and no use for them."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns of one that differs from the call's
    return options


def leave_world() -> None:
    """Leave the world, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
