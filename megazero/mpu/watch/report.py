"""The report of a process of a failed job about itself: plain values, sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from megazero.mpu.grid import Ranks


class CallState(str, Enum):
    """The state of a call.

    `OPEN`: it runs with nobody waiting for it. `WAITED`: someone is waiting. `RETURNED`: its caller went on,
    and the device waits.
    """

    OPEN = "open"
    WAITED = "waited"
    RETURNED = "returned"
    DONE = "done"


class Alarm(str, Enum):
    """The reason for which a process believes that its job has failed.

    `TOLD`: another process said so. `TIMEOUT`: a call took too long. `COMMUNICATION`: a call raised.
    `RAISED`: something else raised. `NOTES`: the notes are out of reach. `STILL`: another process
    gives no sign of life.
    """

    TOLD = "told"
    TIMEOUT = "timeout"
    COMMUNICATION = "communication"
    RAISED = "raised"
    NOTES = "notes"
    STILL = "still"


@dataclass(frozen=True)
class Operation:
    """A collective operation or a message.

    Attributes:
        what: the operation, with its reduction or source if it has one.
        sizes: shape and dtype, which the members must agree on.
    """

    what: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.what} {self.sizes}".rstrip()


@dataclass(frozen=True)
class CallPlace:
    """The place where a call was made.

    Attributes:
        site: file:line of the call, outside mpu.
        asker: file:line in another file that led to the call site, or empty.
    """

    site: str
    asker: str

    def __str__(self) -> str:
        return f"{self.site} (from {self.asker})" if self.asker else self.site


@dataclass(frozen=True)
class CallRecord:
    """One call.

    Attributes:
        serial: its number among all calls of its process.
        channel: key of the channel that it belongs to.
        sequence: its number on the channel, from 1.
        operation: what is called.
        place: where.
        start: wall clock, seconds.
        state: how far the call has come.
    """

    serial: int
    channel: str
    sequence: int
    operation: Operation
    place: CallPlace
    start: float
    state: CallState

    @property
    def signature(self) -> str:
        """The part on which the channel's members must agree; for a send and its receive, their sizes."""
        operation = self.operation
        return operation.sizes if operation.what in ("send", "recv") else str(operation)

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> CallRecord:
        """The record of its fields as JSON."""
        operation, place = Operation(**value["operation"]), CallPlace(**value["place"])
        return cls(**{**value, "operation": operation, "place": place, "state": CallState(value["state"])})


@dataclass(frozen=True)
class ChannelRecord:
    """A channel: its name for people, its members' world ranks, and how many calls have begun."""

    label: str
    members: Ranks
    count: int


@dataclass(frozen=True)
class Report:
    """One process at the moment it learned of the failure.

    Attributes:
        rank: its world rank.
        where: host and process id.
        time: wall clock, seconds.
        alarm: how it learned of the failure.
        error: what was raised or noticed here; empty if another process reported the failure.
        channels: all its channels by key; empty if another process made the report, since they are then
            unknown.
        calls: its latest calls, oldest first.
        stack: the main thread's frames, innermost last.
        alive: whether the process itself made the report.
    """

    rank: int
    where: str
    time: float
    alarm: Alarm
    error: str
    channels: Mapping[str, ChannelRecord]
    calls: tuple[CallRecord, ...]
    stack: tuple[str, ...]
    alive: bool = True

    def to_json(self) -> str:
        """The report as text."""
        return json.dumps(asdict(self), default=lambda ranks: [ranks.start, ranks.stop, ranks.step, "range"])

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` turned into `text`."""
        value = json.loads(text)
        channels = {
            key: ChannelRecord(channel["label"], _ranks(channel["members"]), channel["count"])
            for key, channel in value["channels"].items()
        }
        changed = {
            "alarm": Alarm(value["alarm"]),
            "channels": channels,
            "calls": tuple(map(CallRecord.read, value["calls"])),
            "stack": tuple(value["stack"]),
        }
        return cls(**{**value, **changed})


def _ranks(value: list[int | str]) -> Ranks:
    """The ranks of a list in a report, which is that of a `range` if it says so."""
    *numbers, last = value
    return range(*map(int, numbers)) if last == "range" else tuple(map(int, value))
