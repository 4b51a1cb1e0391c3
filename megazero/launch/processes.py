"""The processes of this machine, from /proc: which ones handle a signal, and which ones belong to a launch.

    python -m megazero.launch.processes MARK

kills every process of a launch's node, including stopped ones, and exits with status 1 if some are left.
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
_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class ProcessState:
    """A process: its parent's pid, the letter of its state, and a mask of the signals that it handles."""

    parent: int
    state: str
    caught: int

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for a signal."""
        return bool(self.caught >> (number - 1) & 1)


def process_table() -> dict[int, ProcessState]:
    """All processes by pid; empty without /proc."""
    return {pid: entry for pid in _pids() if (entry := _entry(pid)) is not None}


def _pids() -> Iterator[int]:
    if _PROC.is_dir():
        yield from (int(name) for name in os.listdir(_PROC) if name.isdecimal())


def _entry(pid: int) -> ProcessState | None:
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:  # the process has ended
        return None
    facts = dict(line.partition(":\t")[::2] for line in lines)
    return ProcessState(int(facts["PPid"]), facts["State"][0], int(facts.get("SigCgt", "0"), 16))


def receivers(pid: int, number: int, table: Mapping[int, ProcessState]) -> list[int]:
    """The pids that get a rank's signal: the process if it handles it, else the nearest descendants that do.

    A shell or torchrun in between would die of SIGUSR1, and the trainer would never get it. If there is no
    handler at all, the process itself gets the signal.
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
    """The pids of other running processes with `mark` in their environment."""
    word = f"{MARK}={mark}".encode()
    pids = []
    for pid in _pids():
        try:
            data = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:  # the process has ended, or belongs to another user
            continue
        if pid != os.getpid() and word in data.split(b"\0"):
            pids.append(pid)
    return pids


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to those of the processes that still exist."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def sweep(mark: str) -> list[int]:
    """Kill the processes of a mark until none is left; return those that could not be killed."""
    deadline = time.monotonic() + _TIMEOUT
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
