"""The number of cores that this process may use, and of those that others use already."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def core_quota() -> float | None:
    """Cores' worth of time that the control group grants; None if it sets no limit."""
    with suppress(OSError, ValueError):
        granted, period = (CGROUP / "cpu.max").read_text().split()
        return int(granted) / int(period)
    return None


def usable_cores() -> int:
    """Cores that this process may run on, by its affinity and its control group; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def load_average() -> float | None:
    """Processes that ran or wanted to in the last minute, on average; None where the system does not say."""
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None
