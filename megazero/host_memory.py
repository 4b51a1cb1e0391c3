"""The host's memory: what is left of it, and the way from there to a device."""

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

AT_ONCE = 64 << 10
"""Bytes up to which CUDA takes memory that is not locked along, and copies it when its turn comes."""


def available_memory() -> int:
    """Bytes of memory that this process can still get, on the host and in its control group."""
    limits = [_from_meminfo()]
    for limit, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # such as "max", or none of that version
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
    """A tensor on the device; if it is the host's, neither waits for the other.

    For more of it than `AT_ONCE`, the host would wait for all the work queued before. torch keeps locked
    blocks, and gives one again once the copy from it is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes > AT_ONCE:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
