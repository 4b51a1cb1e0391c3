"""The transports of a job's groups, which decide the order of sums, and so their last bits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.mpu.messages import gather_values
from megazero.mpu.torch_group import TorchGroup
from megazero.mpu.wrapping_group import WrappingGroup


def transports(context: ParallelContext) -> dict[str, str]:
    """Name of each communicator of more than one rank -> what it goes over; every rank calls this.

    Returns:
        The same on all ranks, such as ``{"tp": "nccl", "world": "gloo"}``; a name whose groups go over
        different things has all of them.
    """
    mine = {name: _transport(group) for name, group in context.groups.items() if group.size > 1}
    everyone = gather_values(context.world, mine, context.device)
    names = sorted({name for theirs in everyone for name in theirs})
    return {
        name: " and ".join(sorted({theirs[name] for theirs in everyone if name in theirs})) for name in names
    }


def _transport(group: Group) -> str:
    while isinstance(group, WrappingGroup):
        group = group.inner
    return dist.get_backend(group.process_group) if isinstance(group, TorchGroup) else "one process"


def backends() -> dict[str, str | None]:
    """The versions of the libraries that torch can open groups over, ``nccl`` and ``gloo``; None if absent.

    Gloo has no version of its own: it is the one of torch.
    """
    versions: dict[str, str | None] = {"nccl": None, "gloo": None}
    if dist.is_available() and dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if dist.is_available() and dist.is_gloo_available():
        versions["gloo"] = torch.__version__
    return versions
