"""`TorchBackend`: an object with the functions of `deepspeed.comm` as methods."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megazero.deepspeed.comm import collectives, world
from megazero.deepspeed.comm.adopt import init_distributed


class TorchBackend:
    """Joins the world of ranks if necessary; has the functions of `deepspeed.comm` as methods.

    Args:
        backend: ``gloo`` or ``nccl``; None chooses by the device.
        timeout: the longest wait of a call for other ranks.
        init_method: the rendezvous, as in torch's ``init_process_group``.
        rank: this rank; -1 takes the launcher's.
        world_size: the number of ranks; -1 takes the launcher's.
        name: the name of the backend.
    """

    def __init__(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ):
        self.name = name
        self.init_process_group(backend, timeout, init_method, rank, world_size)
        self.single_gpu_mode = world.get_world_size() == 1

    def init_process_group(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
        rank: int = -1,
        world_size: int = -1,
    ) -> None:
        """Join the world; see the class."""
        init_distributed(
            backend, timeout=timeout, init_method=init_method, verbose=False, rank=rank, world_size=world_size
        )

    @property
    def initialized(self) -> bool:
        """Whether a world is joined."""
        return dist.is_initialized()

    def is_initialized(self) -> bool:
        """Whether a world is joined."""
        return dist.is_initialized()

    def __getattr__(self, name: str) -> Any:
        for module in (collectives, world):
            if not name.startswith("_") and callable(function := getattr(module, name, None)):
                return function
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
