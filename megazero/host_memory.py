"""The host's memory: the bytes that are available, and copies from it to a device."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor

_GROUPS = Path("/sys/fs/cgroup")
_CGROUPS = (
    (_GROUPS / "memory.max", _GROUPS / "memory.current"),
    (_GROUPS / "memory/memory.limit_in_bytes", _GROUPS / "memory/memory.usage_in_bytes"),
)

STAGED_COPY_BYTES = 64 << 10
"""The most bytes of pageable host memory that CUDA stages itself, so that the host need not wait."""


def available_memory() -> int:
    """Bytes of memory that this process can still get, on the host and in its control group."""
    limits = [_from_meminfo()]
    for limit, used in _CGROUPS:
        # Hosts have one of the two versions, and "max" means no limit.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(limit.read_text()) - int(used.read_text()))
    return min(limits)


def _from_meminfo() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kib << 10


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor on the device; a copy from the host is asynchronous.

    With more than `STAGED_COPY_BYTES` pageable bytes, the host would wait for all work queued before the
    copy, so they are pinned first. torch's allocator reuses a pinned block only after the copy from it has
    ended.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes > STAGED_COPY_BYTES:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
