"""What a process tells the others of a failed job about itself: plain values, sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum


class CallState(str, Enum):
    """How far a call is: `OPEN` under way with nobody waiting for it, `WAITED` someone is in it."""

    OPEN = "open"
    WAITED = "waited"
    DONE = "done"


class Alarm(str, Enum):
    """Why a process takes its job to have failed.

    `TOLD`: another process said so. `TIMEOUT`: a call took too long. `COMMUNICATION`: a call raised.
    `RAISED`: something else raised. `BOARD`: the key-value store is out of reach.
    """

    TOLD = "told"
    TIMEOUT = "timeout"
    COMMUNICATION = "communication"
    RAISED = "raised"
    BOARD = "board"


@dataclass(frozen=True)
class CallRecord:
    """One call.

    Attributes:
        serial: its number among all calls of its process.
        lane: key of the line of calls that it belongs to.
        sequence: its number on the lane, from 1.
        what: the operation, with the reduction or the source where it has one.
        sizes: shape and dtype, which the members must agree on.
        site: file:line of the call, outside mpu.
        asker: file:line in another file from which the site was reached, or empty.
        start: wall clock, seconds.
        state: how far it is.
    """

    serial: int
    lane: str
    sequence: int
    what: str
    sizes: str
    site: str
    asker: str
    start: float
    state: CallState

    @property
    def signature(self) -> str:
        """What the members of the lane must agree on; a send and its receive agree on their sizes."""
        return self.sizes if self.what in ("send", "recv") else self.call

    @property
    def call(self) -> str:
        """The operation with its sizes."""
        return f"{self.what} {self.sizes}".rstrip()

    @property
    def place(self) -> str:
        """Where the call was made."""
        return f"{self.site} (from {self.asker})" if self.asker else self.site


@dataclass(frozen=True)
class LaneRecord:
    """A line of calls: its name for people, its members' world ranks, how many calls have begun."""

    label: str
    members: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Report:
    """One process at the moment it learned of the failure.

    Attributes:
        rank: its world rank.
        where: host and process id.
        time: wall clock, seconds.
        alarm: how it learned.
        error: what was raised or noticed here; empty if another process told.
        lanes: all its lanes by key. Unknown, thus empty, in a report that another process made for it.
        calls: its last calls, oldest first.
        stack: the main thread's frames, innermost last.
        alive: whether the process itself made the report.
    """

    rank: int
    where: str
    time: float
    alarm: Alarm
    error: str
    lanes: Mapping[str, LaneRecord]
    calls: tuple[CallRecord, ...]
    stack: tuple[str, ...]
    alive: bool = True

    def to_json(self) -> str:
        """The report as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` made `text` of."""
        value = json.loads(text)
        calls = [CallRecord(**{**call, "state": CallState(call["state"])}) for call in value["calls"]]
        lanes = {
            key: LaneRecord(lane["label"], tuple(lane["members"]), lane["count"])
            for key, lane in value["lanes"].items()
        }
        changed = {
            "alarm": Alarm(value["alarm"]),
            "lanes": lanes,
            "calls": tuple(calls),
            "stack": tuple(value["stack"]),
        }
        return cls(**{**value, **changed})
