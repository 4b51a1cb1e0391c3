"""The transports of a job's groups, which decide the order of sums, and so their last bits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.mpu.torch_group import TorchGroup
from megazero.mpu.wrapping_group import WrappingGroup

_KINDS = ("gloo", "nccl", "one process")


def transports(context: ParallelContext) -> dict[str, str]:
    """Name of each communicator of more than one rank -> what it goes over; every rank calls this.

    Returns:
        The same on all ranks, such as ``{"tp": "nccl", "world": "gloo"}``; a name whose groups go over
        different things has all of them.
    """
    names = sorted(context.groups)
    mine = {name: _transport(context.groups[name]) for name in names if context.groups[name].size > 1}
    there = torch.tensor(
        [[mine.get(name) == kind for kind in _KINDS] for name in names], device=context.device
    )
    there = there.to(torch.int32)
    context.world.all_reduce(there, "max").wait()
    kinds = {
        name: [kind for kind, some in zip(_KINDS, row, strict=True) if some]
        for name, row in zip(names, there.tolist(), strict=True)
    }
    return {name: " and ".join(some) for name, some in kinds.items() if some}


def _transport(group: Group) -> str:
    while isinstance(group, WrappingGroup):
        group = group.inner
    if not isinstance(group, TorchGroup):
        return "one process"
    kind = dist.get_backend(group.process_group)
    assert kind in _KINDS, f"a group over {kind}"
    return kind


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
