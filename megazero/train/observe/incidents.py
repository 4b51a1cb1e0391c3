"""Incidents: faults that guards report, each as one JSON file and one page of text in the run's folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from megazero.data.files import whole_file
from megazero.errors import CheckpointError
from megazero.mpu.messages import name_ranks
from megazero.mpu.watch.failure import JobFailure
from megazero.train.observe.monitors.base import CompositeMonitor, Monitor
from megazero.train.observe.monitors.jsonl import to_json

FOLDER = "incidents"

Action = Literal["none", "skipped", "rolled back", "repaired", "went on", "stopped"]


@dataclass(frozen=True)
class Incident:
    """A fault of a run.

    Attributes:
        kind: a word or two, such as ``spike`` or ``weights differ``.
        iteration: the step of the fault, from 1; 0 before the first.
        summary: one line for a person.
        action: the run's reaction.
        ranks: the world ranks with the fault; empty if it concerns all alike.
        details: further facts as JSON.
    """

    kind: str
    iteration: int
    summary: str
    action: Action
    ranks: tuple[int, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)


Tell = Callable[[Incident], None]


class IncidentLog:
    """Shows incidents, and writes them to files on one rank.

    An incident that cannot be written is still shown: a full disk must not end a training.

    Args:
        monitor: shows a line for each incident.
        folder: the run's folder; None on ranks that write nothing.
        tell: tells others of each incident.
    """

    def __init__(self, monitor: Monitor, folder: Path | None, tell: Tell = lambda incident: None):
        self.monitor = monitor
        self.folder = folder
        self.tell = tell

    def add(self, incident: Incident) -> None:
        """Show and write an incident."""
        self.tell(incident)
        where = ""
        if self.folder is not None:
            try:
                where = f"; see {_write(self.folder / FOLDER, incident)}"
            except OSError as error:
                where = f"; it could not be written down: {error}"
        self.monitor.message(
            f"incident at iteration {incident.iteration}: {incident.kind}: {incident.summary}; "
            f"{_DONE[incident.action]}{where}"
        )


class FailureLog:
    """Writes an incident about the failure of the job, on the rank with the diagnosis.

    Args:
        folder: the run's folder; None if nothing is written.
        tell: tells others of it.

    Attributes:
        reached: the latest iteration that has begun.
    """

    def __init__(self, folder: Path | None, tell: Tell = lambda incident: None):
        self.log = IncidentLog(CompositeMonitor(), folder, tell)
        self.reached = 0

    def note(self, failure: JobFailure) -> None:
        """Write the incident of a failure."""
        details = {"diagnosis": failure.page.splitlines()}
        incident = Incident("job failed", self.reached, failure.summary, "stopped", failure.ranks, details)
        self.log.add(incident)


def _write(folder: Path, incident: Incident) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    number = sum(name.endswith(".json") for name in os.listdir(folder))
    stem = f"{number:04d}-{incident.iteration:07d}-{incident.kind.replace(' ', '-')}"
    facts = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **asdict(incident)}
    texts = {".txt": page(facts), ".json": json.dumps(to_json(facts), indent=1, allow_nan=False) + "\n"}
    for suffix, text in texts.items():
        with whole_file(folder / f"{stem}{suffix}") as file:
            file.write(text.encode())
    return folder / f"{stem}.txt"


def page(facts: Mapping[str, Any]) -> str:
    """Format a recorded incident as a page of text."""
    ranks = facts["ranks"]
    lines = [
        f"Incident at iteration {facts['iteration']}: {facts['kind']}",
        f"  {facts['summary']}",
        f"  {_DONE[facts['action']]}",
        f"  found {facts['time']}{f', on {name_ranks(ranks)}' if ranks else ''}",
    ]
    for name, value in facts["details"].items():
        lines += ["", f"{name}:"]
        rows = value if isinstance(value, list) else [value]
        lines += [f"  {_row(row)}" for row in rows]
    return "\n".join(lines) + "\n"


def _row(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_row(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_row, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_incidents(folder: Path) -> list[dict[str, object]]:
    """Read the incidents of a run, in the order in which they were written.

    Raises:
        CheckpointError: the folder is missing, or a file in it is not an incident.
    """
    if not folder.is_dir():
        raise CheckpointError(f"`{folder}` must be a run's folder, but is none; check the path")
    incidents = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            facts = json.loads(path.read_bytes())
            incidents.append({name: facts[name] for name in _FIELDS})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"`{path}` must hold an incident, but does not: {type(error).__name__}: {error}; "
                "move it out of the way"
            ) from error
    return incidents


_FIELDS = ("time", *(attribute.name for attribute in fields(Incident)))
_DONE: Mapping[Action, str] = MappingProxyType(
    {
        "none": "nothing was changed",
        "skipped": "the update was left out",
        "rolled back": "the run went back to a checkpoint",
        "repaired": "the copies were made equal",
        "went on": "the result of the repetition was used",
        "stopped": "the run was ended",
    }
)
