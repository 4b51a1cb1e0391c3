"""The number of cores that this process may use, and of those that others use already."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
LOAD = Path("/proc/loadavg")


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
    """Processes that ran or were ready to run in the last minute, on average; None where unknown."""
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def others_running(own: int, load: Path = LOAD) -> int | None:
    """Count the tasks of other processes that run or are ready to run; None if the system does not say.

    The load average would include what a shell ran just before this job, so this looks a few times within
    50 ms and takes the fewest, because tasks of an idle system run for less than that.
    """
    looks = []
    with suppress(OSError, ValueError, IndexError):
        for _ in range(5):
            looks.append(int(load.read_text().split()[3].partition("/")[0]))
            time.sleep(0.01)
    return max(0, min(looks) - own) if looks else None
