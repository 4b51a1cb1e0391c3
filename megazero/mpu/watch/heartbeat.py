"""Signs of life: each process leaves one every few seconds, and a rank that leaves no more is named.

A rank listens to its children in the tree of ranks, and to the rank whose child it is: what it finds, it
tells all others. So in a small job the first rank listens to all, and they listen to the first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from megazero.mpu.tree import children, parent, pause_of
from megazero.mpu.watch.job_notes import JobNotes

_LONGEST_INTERVAL = 5.0  # seconds, in a job of so few ranks that the store can take it
_MOST_BEATS = 1000  # of all ranks in a second
_BEATS = 4  # in the time after which a rank counts as stopped
_LEFT = "left"


@dataclass
class _Heard:
    """The latest sign of life of a rank, and when it was first seen."""

    text: str
    since: float


class Heartbeat:
    """The signs of life of one process, and what it knows of those of others.

    Time counts only while this process is awake, so that nobody is accused after a whole job, or this process
    alone, was stopped for a while and went on. Nor is a rank from which nothing was ever heard.

    Args:
        job_notes: where they are left.
        rank: this process's rank.
        world_size: number of processes.
        where: host and process id.
        patience: seconds without a sign after which a rank counts as stopped.
    """

    def __init__(self, job_notes: JobNotes, rank: int, world_size: int, where: str, patience: float):
        self.patience = patience
        self._job_notes = job_notes
        self._key, self._where = _key(rank), where
        above = parent(rank)
        self._others = [*([] if above is None else [above]), *children(rank, world_size)]
        self._longest = pause_of(_LONGEST_INTERVAL, world_size, _MOST_BEATS)
        self._heard: dict[int, _Heard] = {}
        self._count = 0
        self._clock, self._due = 0.0, 0.0
        self._left = False
        self._lock = threading.Lock()

    def turn(self, awake: float) -> Mapping[int, str]:
        """Leave a sign and look for those of others, if it is time to.

        Args:
            awake: seconds since the last turn in which this process was not stopped.

        Returns:
            For each rank that has stopped, a sentence that says so.

        Raises:
            CommunicationError: the notes are out of reach.
        """
        self._clock += awake
        if self._clock < self._due:
            return {}
        self._due = self._clock + min(self._longest, self.patience / _BEATS)
        self._beat()
        texts = self._job_notes.read_all([_key(rank) for rank in self._others])
        for rank, text in zip(self._others, texts, strict=True):
            known = self._heard.get(rank)
            if text is not None and (known is None or known.text != text):
                self._heard[rank] = _Heard(text, self._clock)
        return {rank: text for rank in self._heard if (text := self._verdict(rank)) is not None}

    def expect(self, patience: float) -> None:
        """Count silence from now on, and take `patience` seconds of it for a stop."""
        self.patience = patience
        for heard in list(self._heard.values()):
            heard.since = self._clock

    def leave(self) -> None:
        """Tell the others that no more signs are to be expected.

        Raises:
            CommunicationError: the notes are out of reach.
        """
        with self._lock:  # or a sign that is on its way would come after this
            if not self._left:
                self._left = True
                self._job_notes.post(self._key, _LEFT)

    def _beat(self) -> None:
        with self._lock:
            if not self._left:
                self._count += 1
                self._job_notes.post(self._key, json.dumps([self._count, self._where]))

    def _verdict(self, rank: int) -> str | None:
        heard = self._heard[rank]
        silent = self._clock - heard.since
        if heard.text == _LEFT or silent < self.patience:
            return None
        try:
            where = json.loads(heard.text)[1]
        except (ValueError, TypeError, LookupError, RecursionError):
            where = "which says nothing of itself"
        return (
            f"rank {rank} ({where}) has given no sign of life for {silent:.0f} s: it is stopped, dead or out "
            "of reach"
        )


def _key(rank: int) -> str:
    return f"beat/{rank}"
