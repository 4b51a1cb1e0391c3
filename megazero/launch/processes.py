"""The processes of this machine, as /proc shows them: who listens to a signal, and who belongs to a launch.

    python -m megazero.launch.processes MARK

kills every process of a launch's node, stopped ones too, and ends with status 1 if one is still there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megazero.launch.job import MARK

_PROC = Path("/proc")
_PATIENCE = 5.0


@dataclass(frozen=True)
class Entry:
    """A process: its parent, its state's letter, and the set of signals that it has handlers for, as a
    mask.
    """

    parent: int
    state: str
    caught: int

    def catches(self, number: int) -> bool:
        """Whether there is a handler for a signal."""
        return bool(self.caught >> (number - 1) & 1)


def process_table() -> dict[int, Entry]:
    """All processes; none where there is no /proc."""
    return {pid: entry for pid in _pids() if (entry := _entry(pid)) is not None}


def _pids() -> Iterator[int]:
    if _PROC.is_dir():
        yield from (int(name) for name in os.listdir(_PROC) if name.isdecimal())


def _entry(pid: int) -> Entry | None:
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:  # it has ended
        return None
    facts = dict(line.partition(":\t")[::2] for line in lines)
    return Entry(int(facts["PPid"]), facts["State"][0], int(facts.get("SigCgt", "0"), 16))


def receivers(pid: int, number: int, table: Mapping[int, Entry]) -> list[int]:
    """Who is to get a signal that is meant for a rank: the process itself if it has a handler, else the
    nearest
    of its descendants that have.

    A shell or torchrun between would die of SIGUSR1, and the trainer would never see it. Where nobody has a
    handler, the process itself gets it.
    """
    children: dict[int, list[int]] = {}
    for child, entry in table.items():
        children.setdefault(entry.parent, []).append(child)

    def below(root: int) -> Iterator[int]:
        if root in table and table[root].catches(number):
            yield root
            return
        for child in children.get(root, ()):
            yield from below(child)

    return list(below(pid)) or [pid]


def marked(mark: str) -> list[int]:
    """The processes, this one and those that have ended left out, whose environment says that they are
    `mark`'s.
    """
    word = f"{MARK}={mark}".encode()
    pids = []
    for pid in _pids():
        try:
            data = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:  # it has ended, or is somebody else's
            continue
        if pid != os.getpid() and word in data.split(b"\0"):
            pids.append(pid)
    return pids


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to some processes, as far as they are there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def sweep(mark: str) -> list[int]:
    """Kill the processes of a mark until none is left; returns those that do not go."""
    deadline = time.monotonic() + _PATIENCE
    while pids := marked(mark):
        send(pids, signal.SIGKILL)
        if time.monotonic() > deadline:
            return pids
        time.sleep(0.02)
    return []


if __name__ == "__main__":
    left = sweep(sys.argv[1])
    if left:
        print(f"processes {left} could not be ended", file=sys.stderr)
    sys.exit(bool(left))
