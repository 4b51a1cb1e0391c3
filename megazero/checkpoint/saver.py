"""`Saver`: the checkpoints of one run, written by all its ranks, in line or in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from megazero.checkpoint.writer import Written, write_description, write_parts
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.mpu import ParallelContext, gather_values


@dataclass(frozen=True)
class _Flight:
    """A checkpoint whose files this rank is writing.

    Attributes:
        iteration: that it is of.
        facts: to be written beside.
        written: what this rank wrote, once it has.
        staging: host memory that is being written from.
    """

    iteration: int
    facts: Mapping[str, Any]
    written: Future
    staging: Staging


class Staging:
    """Host memory that parts are copied to, kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def take(self, parts: Sequence[Part]) -> tuple[list[Part], Callable[[], None]]:
        """Parts on the host, and what waits until they are there; the originals may change at once.

        Memory of accelerators is copied in the order of their work, to page-locked memory.
        """
        alike = len(parts) == len(self._copies) and all(
            (p.tensor.shape, p.tensor.dtype) == (c.shape, c.dtype)
            for p, c in zip(parts, self._copies, strict=True)
        )
        if not alike:
            self._copies = [
                torch.empty(p.tensor.shape, dtype=p.tensor.dtype, pin_memory=p.tensor.is_cuda) for p in parts
            ]
        for part, copy in zip(parts, self._copies, strict=True):
            copy.copy_(part.tensor, non_blocking=True)
        on_device = [part.tensor.device for part in parts if part.tensor.is_cuda]
        arrived = _after_work_on(on_device[0]) if on_device else lambda: None
        return [replace(p, tensor=c) for p, c in zip(parts, self._copies, strict=True)], arrived


class Saver:
    """Writes checkpoints into one folder. Every rank of a job has one and makes the same calls.

    With `in_flight` 0 a save returns when its checkpoint is visible. Otherwise it returns when the parts are
    copied; a thread of each rank writes them, and the ranks make the checkpoint visible together, in
    `settle`. A save beyond `in_flight` unsettled ones waits for the oldest.

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
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._lock: WriterLock | None = None
        together(context, self._open if context.rank == 0 else None, f"open {self.directory} for writing")

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing its part of the oldest unsettled checkpoint."""
        return bool(self._flights) and not self._flights[0].written.done()

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
        while self._flights and len(self._flights) >= self.in_flight:
            visible.append(self.settle())
        folder = hidden_folder(self.directory, iteration, "partial")
        together(
            self.context, (lambda: self._begin(folder)) if self.context.rank == 0 else None, f"make {folder}"
        )
        if not self.in_flight:
            written: Future = Future()
            _fulfil(written, lambda: self._write(folder, parts))
            self._flights.append(_Flight(iteration, facts, written, Staging()))
            return [*visible, self.settle()]
        staging = self._free.pop() if self._free else Staging()
        copies, arrived = staging.take(parts)

        def write() -> Written:
            arrived()
            return self._write(folder, copies)

        self._flights.append(_Flight(iteration, facts, self._writer.submit(write), staging))
        return visible

    def settle(self) -> int:
        """Wait for the oldest checkpoint on its way and make it visible; every rank calls this.

        Returns:
            Its iteration.

        Raises:
            CheckpointError: on every rank, if any could not write its part; nothing is visible then.
        """
        flight = self._flights.popleft()
        folder = hidden_folder(self.directory, flight.iteration, "partial")
        try:
            everyone = together(self.context, lambda: flight.written.result().dump(), f"write into {folder}")

            def finish() -> None:
                written = map(Written.load, everyone)
                write_description(self.disk, folder, flight.iteration, written, flight.facts)
                visible = publish(self.disk, self.directory, flight.iteration)
                try:
                    prune(self.disk, self.directory, self.retention)
                except OSError as error:
                    raise CheckpointError(f"{visible} is saved, but older ones stay: {error}") from error

            first = self.context.rank == 0
            together(self.context, finish if first else None, f"complete {folder}")
        except CheckpointError:
            if self.context.rank == 0:
                self._clear(folder)
            raise
        finally:
            self._free.append(flight.staging)
        return flight.iteration

    def close(self) -> None:
        """Let other jobs write. What was not settled stays invisible."""
        self._writer.shutdown(wait=True, cancel_futures=True)
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

    def _begin(self, folder: Path) -> None:
        # What a save left that failed, and that could not be cleared then, would take room for ever.
        flying = {hidden_folder(self.directory, each.iteration, "partial") for each in self._flights}
        recover(self.disk, self.directory, spared=flying)
        self.disk.make_folder(folder)

    def _write(self, folder: Path, parts: Sequence[Part]) -> Written:
        return write_parts(self.disk, folder, parts, self.context.rank, self.context.world_size)

    def _clear(self, folder: Path) -> None:
        """Give back the room of a checkpoint that failed; the disk may be the reason why, and fail again."""
        try:
            if folder.exists():
                self.disk.remove(folder)
        except OSError:
            return  # it is hidden, and the next save or run removes it


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


def _fulfil(future: Future, work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # raised again where the future is asked
        future.set_exception(error)


def _after_work_on(device: torch.device) -> Callable[[], None]:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
