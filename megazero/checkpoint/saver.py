"""`Saver`: the checkpoints of one run, written by all its ranks, in line or in the background."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import (
    Retention,
    WriterLock,
    hidden_folder,
    prune,
    publish,
    recover,
)
from megazero.checkpoint.part import Part
from megazero.checkpoint.staging import Staging
from megazero.checkpoint.writer import Written, write_description, write_parts
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.mpu import ParallelContext, gather_values


@dataclass
class _Flight:
    """A checkpoint on its way.

    Attributes:
        iteration: that it is of.
        facts: to be written beside.
        staging: host memory that it is written from.
        job: what this rank does for it now: write its files; after that, on the first rank, complete it.
        copied: done once the originals may change.
        completing: whether all files are written.
    """

    iteration: int
    facts: Mapping[str, Any]
    staging: Staging
    job: Future
    copied: Future
    completing: bool = False


class Saver:
    """Writes checkpoints into one folder. Every rank of a job has one and makes the same calls.

    With `in_flight` 0 a save returns when its checkpoint is visible. Otherwise it returns at once: threads
    copy the parts, which must not change before `wait_for_copies` has returned, and write them; between two
    steps of the training the ranks `advance` together, first when all files are written, then when the first
    rank has made them a visible checkpoint. A save beyond `in_flight` waits for the oldest.

    Args:
        directory: of the run; made if missing.
        context: all ranks.
        disk: what writes.
        retention: which older checkpoints stay.
        in_flight: checkpoints that may be on their way at a time; 0 writes in line.

    Raises:
        CheckpointError: on every rank, if the folder cannot be written or another job writes there.
    """

    def __init__(
        self,
        directory: str | Path,
        context: ParallelContext,
        disk: Disk | None = None,
        retention: Retention | None = None,
        in_flight: int = 0,
    ):
        self.directory = Path(directory)
        self.context = context
        self.disk = disk or Disk()
        self.retention = retention or Retention()
        self.in_flight = in_flight
        self._flights: deque[_Flight] = deque()
        self._free: list[Staging] = []
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-copy")
        self._writer = ThreadPoolExecutor(max_workers=2, thread_name_prefix="checkpoint")
        self._lock: WriterLock | None = None
        together(context, self._open if context.rank == 0 else None, f"open {self.directory} for writing")

    @property
    def busy(self) -> bool:
        """Whether this rank is at work for the oldest checkpoint on its way."""
        return bool(self._flights) and not self._flights[0].job.done()

    @property
    def unsettled(self) -> int:
        """Checkpoints that are on their way; the same on all ranks."""
        return len(self._flights)

    def save(self, iteration: int, parts: Sequence[Part], facts: Mapping[str, Any]) -> list[int]:
        """Save a checkpoint, or begin to.

        Args:
            iteration: that it is of.
            parts: what this rank writes; see `shards.parts_to_write`.
            facts: everything else, as JSON; the first rank's are written.

        Returns:
            The iterations of the checkpoints that became visible.

        Raises:
            CheckpointError: on every rank, if any could not; nothing of it is visible then. Of an earlier
                checkpoint that was on its way, if that could not be settled.
        """
        visible = []
        # One that is on its way again would be cleared while it is written.
        while len(self._flights) >= max(1, self.in_flight) or iteration in self._iterations():
            visible.append(self.settle())
        folder = hidden_folder(self.directory, iteration, "partial")
        together(
            self.context, (lambda: self._begin(folder)) if self.context.rank == 0 else None, f"make {folder}"
        )
        if not self.in_flight:
            job = _done_here(lambda: self._write(folder, parts))
            self._flights.append(_Flight(iteration, facts, Staging(), job, job))
            return [*visible, self.settle()]
        staging = self._free.pop() if self._free else Staging()
        copies, fill = staging.take(parts)
        copied = self._copier.submit(fill)

        def write() -> Written:
            copied.result()
            return self._write(folder, copies)

        self._flights.append(_Flight(iteration, facts, staging, self._writer.submit(write), copied))
        return visible

    def wait_for_copies(self) -> None:
        """Return when the parts of all checkpoints on their way may change."""
        for flight in self._flights:
            flight.copied.result()

    def advance(self) -> int | None:
        """Take the oldest checkpoint a stage further; every rank calls this, best when none is `busy`.

        Returns:
            Its iteration, once it is visible.

        Raises:
            CheckpointError: on every rank, if any could not do its part; nothing is visible then.
        """
        flight = self._flights[0]
        folder = hidden_folder(self.directory, flight.iteration, "partial")
        first = self.context.rank == 0
        try:
            if not flight.completing:
                everyone = together(self.context, lambda: flight.job.result().dump(), f"write into {folder}")
                if first:
                    work = partial(self._complete, folder, flight, everyone)
                    flight.job = self._writer.submit(work) if self.in_flight else _done_here(work)
                flight.completing = True
                return None
            together(self.context, flight.job.result if first else None, f"complete {folder}")
        except CheckpointError:
            self._forget(flight)
            if first:
                self._tidy(lambda path: path == folder)
            raise
        self._forget(flight)
        return flight.iteration

    def settle(self) -> int:
        """Wait for the oldest checkpoint on its way and make it visible; every rank calls this.

        Returns:
            Its iteration.

        Raises:
            CheckpointError: as `advance`.
        """
        while (iteration := self.advance()) is None:
            pass
        return iteration

    def close(self) -> None:
        """Let other jobs write. What was not settled stays invisible."""
        for threads in (self._copier, self._writer):
            threads.shutdown(wait=True, cancel_futures=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open(self) -> None:
        self.disk.make_parents(self.directory)
        self._lock = WriterLock(self.directory)
        try:
            recover(self.disk, self.directory)
        except OSError:
            self._lock.release()
            raise

    def _iterations(self) -> list[int]:
        return [flight.iteration for flight in self._flights]

    def _begin(self, folder: Path) -> None:
        flying = {hidden_folder(self.directory, each.iteration, "partial") for each in self._flights}
        self._tidy(lambda path: path.suffix == ".partial" and path not in flying)
        self.disk.make_folder(folder)

    def _write(self, folder: Path, parts: Sequence[Part]) -> Written:
        return write_parts(self.disk, folder, parts, self.context.rank, self.context.world_size)

    def _complete(self, folder: Path, flight: _Flight, everyone: Sequence[Mapping[str, Any]]) -> None:
        self._tidy(lambda path: path.suffix != ".partial")
        write_description(self.disk, folder, flight.iteration, map(Written.load, everyone), flight.facts)
        visible = publish(self.disk, self.directory, flight.iteration)
        try:
            prune(self.disk, self.directory, self.retention)
        except OSError as error:
            raise CheckpointError(f"{visible} is saved, but older ones stay: {error}") from error

    def _tidy(self, which: Callable[[Path], bool]) -> None:
        """Clear what a failed save has left. The disk may be why, and fail again; a later save tries anew."""
        with contextlib.suppress(OSError):
            recover(self.disk, self.directory, which)

    def _forget(self, flight: _Flight) -> None:
        self._flights.popleft()
        if self.in_flight:
            self._free.append(flight.staging)


def together(context: ParallelContext, work: Callable[[], Any] | None, what: str) -> list[Any]:
    """Do `work` here if this rank has any; a failure on one rank is raised on all.

    Returns:
        Every rank's result, which must be JSON-able.

    Raises:
        CheckpointError: on every rank; the first rank that failed is named, and why. Of the kind that it was.
    """
    found: dict[str, Any] = {}
    if work is not None:
        try:
            found["result"] = work()
        except CheckpointError as error:
            found |= {"failure": str(error), "damaged": isinstance(error, DamagedCheckpointError)}
        except OSError as error:
            found["failure"] = f"{type(error).__name__}: {error}"
    everyone = gather_values(context.world, found, context.device)
    for rank, each in enumerate(everyone):
        if "failure" in each:
            kind = DamagedCheckpointError if each.get("damaged") else CheckpointError
            raise kind(f"rank {rank} could not {what}: {each['failure']}")
    return [each.get("result") for each in everyone]


def _done_here(work: Callable[[], Any]) -> Future:
    future: Future = Future()
    try:
        future.set_result(work())
    except Exception as error:  # raised again where the future is asked
        future.set_exception(error)
    return future
