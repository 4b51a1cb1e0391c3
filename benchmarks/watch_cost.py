"""What the watch adds to a call between ranks: microseconds of a call that does nothing, watched and not.

    python benchmarks/watch_cost.py

The group has two members whose calls return at once, so what is left is the host's own work. Calls come
from a place as deep as a layer's, and are recorded in a mapped file, as in a job. It prints one JSON line:
medians over rounds in which the contenders take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megazero.mpu.group import DONE, Group, Work
from megazero.mpu.watch.group import watched
from megazero.mpu.watch.watch import Watch, WatchLimits
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup

CALLS, ROUNDS = 2_000, 15


class Notes:
    """Notes that nobody else leaves."""

    def post(self, key: str, text: str) -> None:
        pass

    def read(self, key: str) -> str | None:
        return None

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        return [None] * len(keys)


class Later(Work):
    """A call that is done when somebody asks."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> object:
        return None


class IdleGroup(WrappingGroup):
    """Two members; calls do nothing."""

    def __init__(self) -> None:
        self.inner = self
        self.name, self.rank, self.ranks = "dp", 0, (0, 1)

    def _collective(self, call: GroupCall) -> Work:
        return Later() if call.async_op else DONE


def calls_of(group: Group, *, later: bool) -> Callable[[int], None]:
    """A loop of calls in a file of its own, called through six functions of another one."""
    layer = "def calls(n):\n    for _ in range(n):\n        call()\n"
    model = "def depth(n, left=6):\n    return depth(n, left - 1) if left else calls(n)\n"
    tensor = torch.zeros(4, 8)

    def wait() -> None:
        group.all_reduce(tensor, async_op=True).wait()

    names: dict[str, object] = {"call": wait if later else lambda: group.all_reduce(tensor)}
    exec(compile(layer, "layers/idle.py", "exec"), names)
    exec(compile(model, "models/idle.py", "exec"), names)
    return names["depth"]  # type: ignore[return-value]


def main() -> None:
    watch = Watch(Notes(), 0, 2, WatchLimits(600.0))
    idle = IdleGroup()
    contenders = {
        name: calls_of(group, later=later)
        for name, group, later in (
            ("plain", idle, False),
            ("watched", watched(idle, watch), False),
            ("plain, waited for", idle, True),
            ("watched, waited for", watched(idle, watch), True),
        )
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            began = time.perf_counter()
            run(CALLS)
            times[name].append((time.perf_counter() - began) / CALLS * 1e6)
    watch.close()
    print(json.dumps({name: round(statistics.median(values), 2) for name, values in times.items()}))


if __name__ == "__main__":
    main()
