"""The steps by which the processes of a failed job reach one diagnosis over a `JobNotes`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from megazero.errors import CommunicationError, printable
from megazero.mpu.tree import pause_of
from megazero.mpu.watch.diagnose import diagnose, render, standing
from megazero.mpu.watch.job_notes import JobNotes
from megazero.mpu.watch.log import has_ended, read_log
from megazero.mpu.watch.report import Alarm, Report

_LOOK = 0.1
_MOST_LOOKS = 10_000  # of all ranks in a second
_SECOND_CALL = 2.0
_PARTING = 5.0
_SENSELESS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading a note raises that no rank has left."""
_NOBODY: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True)
class JobFailure:
    """The cause of a job's failure, as the process that made the diagnosis knows it.

    Attributes:
        summary: one line.
        page: all of it.
        ranks: the world ranks that are accused first; none if it is not known.
    """

    summary: str
    page: str
    ranks: tuple[int, ...] = ()


class FailureDiagnosis:
    """One process's part in reaching the diagnosis.

    The lowest living rank reads all reports, prints the diagnosis and posts its summary. If a process posts
    no report, another process on the same host reads the log that it left.

    Args:
        job_notes: the notes of the job's processes.
        rank: this process's rank.
        world_size: number of processes.
        grace: seconds within which reports must arrive.
        listener: called where the diagnosis is made, besides printing it.

    Attributes:
        record: a sentence about the record that NCCL keeps of its calls. It ends the page of a diagnosis that
            this process makes, unless a rank's own error is the cause.
    """

    def __init__(
        self,
        job_notes: JobNotes,
        rank: int,
        world_size: int,
        grace: float,
        listener: Callable[[JobFailure], None] = lambda failure: None,
    ):
        self.job_notes = job_notes
        self.rank = rank
        self.world_size = world_size
        self.grace = grace
        self.record = ""
        self._listener = listener
        self._host = ""

    @property
    def longest(self) -> float:
        """Seconds within which `hold` is sure to return, if the notes are within reach."""
        return 5 * self.grace + 2 * _SECOND_CALL

    def announce(self, host: str, log: str | None) -> None:
        """Tell the others, before anything happens, where this process keeps its log.

        Raises:
            CommunicationError: the notes are out of reach.
        """
        self._host = host
        self.job_notes.post(f"log/{self.rank}", json.dumps([host, log]))

    def trouble(self) -> bool:
        """Whether some process has said that the job has failed.

        Raises:
            CommunicationError: the notes are out of reach.
        """
        return self.job_notes.read("trouble") is not None

    def part(self) -> None:
        """Say that this process reads no more notes; rank 0, which may keep them, waits until all have.

        A process that is gone says nothing, and is waited for a few seconds.
        """
        everyone = [f"parted/{rank}" for rank in range(self.world_size)]
        pause = pause_of(0.01, self.world_size, _MOST_LOOKS)
        end = time.monotonic() + min(self.grace, _PARTING)
        with suppress(CommunicationError):
            self.job_notes.post(everyone[self.rank], "")
            while self.rank == 0 and None in self.job_notes.read_all(everyone) and time.monotonic() < end:
                time.sleep(pause)

    def hold(self, report: Report, still: Mapping[int, str] = _NOBODY) -> str:
        """Tell the others, post `report`, wait until the diagnosis is printed, and return its summary.

        Args:
            report: this process's.
            still: for each rank from which this process hears nothing, a sentence that says so. No report is
                expected of it.
        """
        if report.alarm is Alarm.NOTES:
            return self._say_alone(report.error, replace(report, error=""))
        try:
            if still:
                self.job_notes.post("still", json.dumps(still))  # before the trouble, with which it is read
            self.job_notes.post("trouble", str(self.rank))
            self.job_notes.post(f"report/{self.rank}", report.to_json())
            if (summary := self.job_notes.read("summary")) is not None:
                return self._end_with(summary)
            with suppress(*_SENSELESS):
                known = json.loads(self.job_notes.read("still") or "{}")
                still = {int(rank): str(text) for rank, text in known.items() if int(rank) != self.rank}
            lower = any(rank not in still for rank in range(self.rank))
            return self._await(still) if lower else self._collect(self.grace, still)
        except CommunicationError as error:
            return self._say_alone(str(error), report)

    def _say_alone(self, why: str, report: Report) -> str:
        """Print what this process knows by itself, as the notes are out of reach."""
        summary = f"{why}; rank {self.rank}: {standing(report)}"
        self._tell(JobFailure(summary, f"megazero: the job has failed: {summary}"))
        return summary

    def _tell(self, failure: JobFailure) -> None:
        _say(failure.page)
        self._listener(failure)

    def _await(self, still: Mapping[int, str]) -> str:
        """The summary that another process posts; if no lower rank is alive, this process makes it."""
        asked = False
        for patience in (self.grace, 2 * self.grace):
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and not self._have_ended(range(self.rank)):
                if (summary := self.job_notes.read("summary")) is not None:
                    return self._end_with(summary)
                if not asked and (wanted := self.job_notes.read("wanted")) is not None:
                    asked = True
                    with suppress(*_SENSELESS):
                        self._speak_for(json.loads(wanted))
                time.sleep(pause_of(_LOOK, self.world_size, _MOST_LOOKS))
            if all(self.job_notes.read(f"report/{rank}") is None for rank in range(self.rank)):
                return self._collect(0.0, still)
        raise CommunicationError("the rank that should make the diagnosis has not done so")

    def _end_with(self, summary: str) -> str:
        self.job_notes.post(f"seen/{self.rank}", "")
        _say(f"megazero: rank {self.rank} ends with its job: {summary}")
        return summary

    def _collect(self, patience: float, still: Mapping[int, str]) -> str:
        reports: dict[int, Report] = {}
        self._gather(reports, patience, still)
        silent = [rank for rank in range(self.world_size) if rank not in reports]
        if silent:
            self.job_notes.post("wanted", json.dumps(silent))
            self._speak_for(silent)
            self._gather(reports, min(_SECOND_CALL, self.grace))
        diagnosis = diagnose(reports, self.world_size, self.grace, still)
        page = render(diagnosis, reports, self.world_size)
        if self.record and all(report.alarm is not Alarm.RAISED for report in reports.values()):
            page += f"\n  {self.record}"
        self._tell(JobFailure(diagnosis.summary, page, diagnosis.findings[0].ranks))
        self.job_notes.post("summary", diagnosis.summary)
        others = [rank for rank, report in reports.items() if report.alive and rank != self.rank]
        # The notes may live in this process, so wait until the others have read it.
        deadline = time.monotonic() + _SECOND_CALL
        while others and time.monotonic() < deadline:
            time.sleep(_LOOK)
            others = [rank for rank in others if self.job_notes.read(f"seen/{rank}") is None]
        return diagnosis.summary

    def _gather(self, reports: dict[int, Report], patience: float, unexpected: Collection[int] = ()) -> None:
        """Read into `reports` those that arrive within `patience` seconds, or until all others have ended."""
        expected = [rank for rank in range(self.world_size) if rank not in unexpected]
        deadline = time.monotonic() + patience
        while True:
            missing = (rank for rank in expected if rank not in reports)
            over = time.monotonic() >= deadline or self._have_ended(missing)
            for rank in range(self.world_size):
                if rank not in reports and (text := self.job_notes.read(f"report/{rank}")) is not None:
                    with suppress(*_SENSELESS):
                        reports[rank] = Report.from_json(text)
            if over or all(rank in reports for rank in expected):
                return
            time.sleep(_LOOK)

    def _speak_for(self, silent: list[int]) -> None:
        """Post reports for those of the `silent` ranks whose logs are on this host."""
        for rank in silent:
            path = self._log_here(rank)
            try:
                calls, why = tuple(read_log(path)), "its process has ended" if has_ended(path) else ""
            except (OSError, *_SENSELESS):  # another process has read it, or its owner ended cleanly
                continue
            report = Report(rank, self._host, time.time(), Alarm.TOLD, why, {}, calls, (), alive=False)
            self.job_notes.post(f"report/{rank}", report.to_json())
            Path(path).unlink(missing_ok=True)

    def _have_ended(self, ranks: Iterable[int]) -> bool:
        """Whether the processes of all these ranks are known to have ended, all on this host."""
        with suppress(OSError):
            return all(has_ended(self._log_here(rank)) for rank in ranks)
        return False

    def _log_here(self, rank: int) -> str:
        """The file of a rank's log; "" if it is on another host, or there is none."""
        with suppress(*_SENSELESS):
            host, path = json.loads(self.job_notes.read(f"log/{rank}") or '["", null]')
            return str(path or "") if host == self._host else ""
        return ""


def _say(text: str) -> None:
    """Print `text` in one piece, so that processes sharing a terminal do not break up each other's lines."""
    sys.stderr.write(printable(text, "\n\t") + "\n")  # notes are what anyone says who reaches the store
    sys.stderr.flush()
