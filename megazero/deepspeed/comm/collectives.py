"""Torch's collectives and messages, with DeepSpeed's names, arguments and log.

A group is torch's or megazero's; None is the world. With `async_op` a call returns a handle, else None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work

from megazero.deepspeed.comm.log import logged
from megazero.deepspeed.comm.world import AnyGroup, process_group
from megazero.errors import ConfigError

Op = ReduceOp | ReduceOp.RedOpType
SUM = ReduceOp.SUM
Handle = Any
"""A `Work`, or None for a call that is done; torch does not annotate its collectives."""
# torch 2.13 renamed the two single-tensor collectives and deprecated the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@logged
def broadcast(tensor: Tensor, src: int, group: AnyGroup = None, async_op: bool = False) -> Handle:
    """Every rank's `tensor` becomes that of world rank `src`."""
    return dist.broadcast(tensor, src, process_group(group), async_op)


@logged
def broadcast_object_list(
    object_list: list[Any], src: int, group: AnyGroup = None, device: torch.device | None = None
) -> None:
    """Every rank's list becomes that of world rank `src`, pickled on the way."""
    dist.broadcast_object_list(object_list, src, process_group(group), device)


@logged
def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> Handle:
    """``tensor_list[i]`` becomes the `tensor` of rank ``i``."""
    return dist.all_gather(tensor_list, tensor, process_group(group), async_op)


@logged
def all_gather_object(object_list: list[Any], obj: object, group: AnyGroup = None) -> None:
    """``object_list[i]`` becomes the object of rank ``i``, pickled on the way."""
    dist.all_gather_object(object_list, obj, process_group(group))


@logged
def all_gather_into_tensor(
    output_tensor: Tensor, tensor: Tensor, group: AnyGroup = None, async_op: bool = False
) -> Handle:
    """`output_tensor` becomes the tensors of all ranks, concatenated."""
    return _all_gather(output_tensor, tensor, group=process_group(group), async_op=async_op)


def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: AnyGroup = None,
    async_op: bool = False,
    debug: object = None,
) -> Handle:
    """`all_gather_into_tensor` by its older name."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> Handle:
    """`all_gather_into_tensor` for each output and input; returns the last call's handle."""
    works = [
        all_gather_into_tensor(output, tensor, group, async_op=True)
        for output, tensor in zip(output_tensors, input_tensors, strict=True)
    ]
    return _last(works, async_op)


@logged
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Op = SUM, group: AnyGroup = None, async_op: bool = False
) -> Handle:
    """`output` becomes the sum of all ranks' ``input_list[i]``, where ``i`` is this rank."""
    return dist.reduce_scatter(output, input_list, op, process_group(group), async_op)


@logged
def reduce_scatter_tensor(
    output_tensor: Tensor, tensor: Tensor, op: Op = SUM, group: AnyGroup = None, async_op: bool = False
) -> Handle:
    """`output_tensor` becomes this rank's slice of the sum of all ranks' tensors."""
    return _reduce_scatter(output_tensor, tensor, op=op, group=process_group(group), async_op=async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Op = SUM,
    group: AnyGroup = None,
    async_op: bool = False,
    prof: bool = False,
    debug: object = None,
) -> Handle:
    """`reduce_scatter_tensor` by its older name."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof)


@logged
def all_reduce(tensor: Tensor, op: Op = SUM, group: AnyGroup = None, async_op: bool = False) -> Handle:
    """Every rank's `tensor` becomes the sum over all ranks."""
    return dist.all_reduce(tensor, op, process_group(group), async_op)


@logged
def inference_all_reduce(
    tensor: Tensor, op: Op = SUM, group: AnyGroup = None, async_op: bool = False
) -> Handle:
    """`all_reduce`; returns the tensor in a group of one."""
    if dist.get_world_size(process_group(group)) == 1:
        return tensor
    return dist.all_reduce(tensor, op, process_group(group), async_op)


@logged
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Op = SUM, group: AnyGroup = None, async_op: bool = False
) -> Handle:
    """`all_reduce` of each tensor; returns the last call's handle."""
    works = [dist.all_reduce(tensor, op, process_group(group), async_op=True) for tensor in tensors]
    return _last(works, async_op)


@logged
def reduce(tensor: Tensor, dst: int, op: Op = SUM, group: AnyGroup = None, async_op: bool = False) -> Handle:
    """The `tensor` of world rank `dst` becomes the sum over all ranks."""
    return dist.reduce(tensor, dst, op, process_group(group), async_op)


@logged
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Handle:
    """``gather_list[i]`` of world rank `dst` becomes the `tensor` of rank ``i``."""
    return dist.gather(tensor, gather_list, dst, process_group(group), async_op)


@logged
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Handle:
    """`tensor` of rank ``i`` becomes ``scatter_list[i]`` of world rank `src`."""
    return dist.scatter(tensor, scatter_list, src, process_group(group), async_op)


@logged
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: AnyGroup = None,
    async_op: bool = False,
) -> Handle:
    """Send slice ``i`` of `tensor` to rank ``i``; `output` becomes the slices received, concatenated."""
    sizes = output_split_sizes, input_split_sizes
    return dist.all_to_all_single(output, tensor, *sizes, process_group(group), async_op)


@logged
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: AnyGroup = None,
    async_op: bool = False,
) -> Handle:
    """Send ``input_tensor_list[i]`` to rank ``i``, and receive ``output_tensor_list[i]`` from it."""
    return dist.all_to_all(output_tensor_list, input_tensor_list, process_group(group), async_op)


@logged
def send(tensor: Tensor, dst: int, group: AnyGroup = None, tag: int = 0) -> None:
    """Send to world rank `dst`."""
    dist.send(tensor, dst, process_group(group), tag)


@logged
def recv(tensor: Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0) -> int:
    """Receive from world rank `src`, by default from any; returns the sender."""
    return dist.recv(tensor, src, process_group(group), tag)


@logged
def isend(tensor: Tensor, dst: int, group: AnyGroup = None, tag: int = 0) -> Handle:
    """Start to send to world rank `dst`; returns a handle."""
    return dist.isend(tensor, dst, process_group(group), tag)


@logged
def irecv(tensor: Tensor, src: int | None = None, group: AnyGroup = None, tag: int = 0) -> Handle:
    """Start to receive from world rank `src`; returns a handle."""
    return dist.irecv(tensor, src, process_group(group), tag)


class P2POp:
    """A message of `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv`, of this module or of torch.
        tensor: the tensor to send, or to receive into.
        peer: the world rank of the other side.
        group: a group that has both ranks.
        tag: distinguishes messages between the same ranks.

    Raises:
        ConfigError: `op` is neither.
    """

    def __init__(
        self, op: Callable[..., object], tensor: Tensor, peer: int, group: AnyGroup = None, tag: int = 0
    ):
        if op not in (isend, irecv, dist.isend, dist.irecv):
            raise ConfigError(f"`op` must be isend or irecv of deepspeed.comm, but is {op}; choose one")
        self.op = op.__name__
        self.tensor, self.peer, self.group, self.tag = tensor, peer, group, tag


@logged
def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start all messages of a list; returns their handles."""
    calls = {"isend": dist.isend, "irecv": dist.irecv}
    return dist.batch_isend_irecv(
        [dist.P2POp(calls[m.op], m.tensor, m.peer, process_group(m.group), m.tag) for m in p2p_op_list]
    )


@logged
def barrier(group: AnyGroup = None, async_op: bool = False, device_ids: list[int] | None = None) -> Handle:
    """Wait until every rank is here."""
    return dist.barrier(process_group(group), async_op, device_ids)


@logged
def monitored_barrier(
    group: AnyGroup = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank is here; an error names missing ranks (Gloo only)."""
    dist.monitored_barrier(process_group(group), timeout, wait_all_ranks)


def _last(works: list[Work | None], async_op: bool) -> Work | None:
    """The last handle if the call is asynchronous; else wait for all of them and return None."""
    for work in works if not async_op else ():
        if work is not None:
            work.wait()
    return works[-1] if async_op and works else None
