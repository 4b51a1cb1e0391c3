"""How the groups of a job move data; this decides the order of their sums, and so the last bits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.mpu.messages import gather_values
from megazero.mpu.shared_group import SharedGroup
from megazero.mpu.torch_group import TorchGroup
from megazero.mpu.wrapping_group import WrappingGroup


def transports(context: ParallelContext) -> dict[str, str]:
    """Name of each communicator of more than one rank -> what it goes over; every rank calls this.

    Returns:
        The same on all ranks, such as ``{"tp": "shared memory", "world": "gloo"}``; a name whose groups go
        over different things has all of them.
    """
    mine = {name: _transport(group) for name, group in context.groups.items() if group.size > 1}
    everyone = gather_values(context.world, mine, context.device)
    names = sorted({name for each in everyone for name in each})
    return {name: " and ".join(sorted({each[name] for each in everyone if name in each})) for name in names}


def _transport(group: Group) -> str:
    while isinstance(group, WrappingGroup):
        group = group.inner
    if isinstance(group, SharedGroup):
        return "shared memory"
    return dist.get_backend(group.process_group) if isinstance(group, TorchGroup) else "one process"


def backends() -> dict[str, str | None]:
    """What torch can open groups over: ``nccl`` and ``gloo``, each its version, or None where it is absent.

    Gloo has no version of its own: it is the one of torch.
    """
    found: dict[str, str | None] = {"nccl": None, "gloo": None}
    if dist.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if dist.is_available() and dist.is_gloo_available():
        found["gloo"] = torch.__version__
    return found
