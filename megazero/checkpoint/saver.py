"""`Saver`: writes the checkpoints of a run from all its ranks, at once or in the background."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import Retention, hidden_folder, prune, publish, recover
from megazero.checkpoint.lock import FOLDER_FACT, WriterLock
from megazero.checkpoint.manifest import Facts
from megazero.checkpoint.part import Part
from megazero.checkpoint.parts_writer import Tally, fold, write_contents, write_part
from megazero.checkpoint.remote.disk import disk_for
from megazero.checkpoint.remote.mirror import local_path
from megazero.checkpoint.staging import Staging
from megazero.checkpoint.writer import Written, write_description, write_parts
from megazero.errors import CheckpointError, DamagedCheckpointError, LostFolderError
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import first_value, fold_values
from megazero.mpu.threads import helper_pool

_Result = TypeVar("_Result")

# The errors that `together` raises as they are on all ranks, by name; others become CheckpointError.
_KINDS = MappingProxyType({kind.__name__: kind for kind in (DamagedCheckpointError, LostFolderError)})


@dataclass
class _PendingSave:
    """A checkpoint that is being written.

    Attributes:
        iteration: the iteration after which it is saved.
        facts: the content of ``state.json``.
        save: a random name of this save, the same on all ranks.
        staging: the host memory with the copies of its tensors.
        job: this rank's current work: writing its files; afterwards, on the first rank, completing the
            checkpoint.
        copied: done once the originals may change.
        completing: whether all ranks have written their files.
    """

    iteration: int
    facts: Facts
    save: str
    staging: Staging
    job: Future[Written | list[Tally]] | Future[None]
    copied: Future[Written]
    completing: bool = False


class Saver:
    """Writes checkpoints into one folder. Every rank of a job has a saver and makes the same calls.

    With `in_flight` 0 a save returns when its checkpoint is visible. Otherwise it returns at once, and
    threads copy the parts and write the copies; the parts must not change before `wait_for_copies` returns.
    Offloaded parts are not copied, to save host memory: they are written from where they are, into files of
    their own, and `wait_for_copies` waits for these files. Between two training steps the ranks call
    `advance` together, once when all files are written, and again when the first rank has made the
    checkpoint visible. A save beyond `in_flight` waits for the oldest.

    Args:
        directory: the run's folder; made if missing.
        context: the ranks of the job.
        disk: makes all changes to the file system.
        retention: which older checkpoints are kept.
        in_flight: the number of checkpoints that may be pending; 0 saves synchronously.

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
        self.directory = local_path(directory)
        self.context = context
        self.disk = disk or disk_for(self.directory)
        self.retention = retention or Retention()
        self.in_flight = in_flight
        self._pending: deque[_PendingSave] = deque()
        self._free: list[Staging] = []
        self._copier = helper_pool(1, "checkpoint-copy")
        self._writer = helper_pool(2, "checkpoint")
        self._lock: WriterLock | None = None
        together(context, self._open if context.rank == 0 else None, f"open {self.directory} for writing")

    @property
    def busy(self) -> bool:
        """Whether this rank is still working on the oldest pending checkpoint."""
        return bool(self._pending) and not self._pending[0].job.done()

    @property
    def unsettled(self) -> int:
        """The number of pending checkpoints, the same on all ranks."""
        return len(self._pending)

    def is_full(self, iteration: int) -> bool:
        """Whether the oldest pending checkpoint must be settled before this iteration's is begun."""
        # A pending save of the same iteration has the same hidden folder, which a new save clears.
        return len(self._pending) >= max(1, self.in_flight) or iteration in self._iterations()

    def save(self, iteration: int, parts: Sequence[Part], facts: Facts) -> list[int]:
        """Save a checkpoint, or begin to save it.

        Args:
            iteration: the iteration that was just completed.
            parts: the parts that this rank writes; see `shards.parts_to_write`.
            facts: the content of ``state.json``; the first rank's is written.

        Returns:
            The iterations of the checkpoints that became visible.

        Raises:
            CheckpointError: on every rank, if any rank could not save, or an earlier pending checkpoint could
                not be settled; that checkpoint is not visible then.
        """
        visible = []
        while self.is_full(iteration):
            visible.append(self.settle())
        folder = hidden_folder(self.directory, iteration, "partial")
        begin = (lambda: self._begin(folder)) if self.context.rank == 0 else None
        name = together(self.context, begin, f"make {folder}")
        self.disk.begin(folder, name)
        staging = self._free.pop() if self._free else Staging(self.context.streams.aside())
        copied_parts = [part for part in parts if not part.offloaded]
        if not self.in_flight or not staging.has_room(copied_parts):
            if self.in_flight:
                warnings.warn(
                    "the copies of an asynchronous save must fit into the host's memory, but there is too "
                    "little left; training waits until this checkpoint is written",
                    stacklevel=2,
                )
            written = _done_here(lambda: self._write(folder, parts))
            job = _done_here(lambda: self._describe(folder, name, written.result()))
            self._pending.append(_PendingSave(iteration, facts, name, staging, job, written))
            return visible if self.in_flight else [*visible, self.settle()]
        copies, fill = staging.take(copied_parts)
        offloaded = [part for part in parts if part.offloaded]

        def copy() -> Written:
            fill()
            return self._write(folder, offloaded, "-offloaded")

        copied = self._copier.submit(copy)

        def write() -> Written | list[Tally]:
            return self._describe(folder, name, copied.result() + self._write(folder, copies))

        job = self._writer.submit(write)
        self._pending.append(_PendingSave(iteration, facts, name, staging, job, copied))
        return visible

    def wait_for_copies(self) -> None:
        """Return when the parts of all pending checkpoints may change."""
        wait([pending.copied for pending in self._pending])  # `settle` reports failures

    def advance(self) -> int | None:
        """Take the oldest pending checkpoint one stage further; best called when no rank is `busy`.

        Every rank calls this.

        Returns:
            Its iteration once it is visible, else None.

        Raises:
            CheckpointError: on every rank, if any rank failed; the checkpoint is not visible then.
        """
        pending = self._pending[0]
        folder = hidden_folder(self.directory, pending.iteration, "partial")
        first = self.context.rank == 0
        try:
            if not pending.completing:
                together(self.context, lambda: pending.job.result() and None, f"write into {folder}")
                described = fold_values(self.context.world, pending.job.result(), fold, self.context.device)
                if first:
                    work = partial(self._complete, folder, pending, described)
                    pending.job = self._writer.submit(work) if self.in_flight else _done_here(work)
                pending.completing = True
                return None
            together(self.context, pending.job.result if first else None, f"complete {folder}")
        except CheckpointError:
            self._forget(pending)
            if first:
                self._tidy(lambda path: path == folder)
            raise
        self._forget(pending)
        return pending.iteration

    def settle(self) -> int:
        """Wait for the oldest pending checkpoint and make it visible; every rank calls this.

        Returns:
            Its iteration.

        Raises:
            CheckpointError: as for `advance`.
        """
        while (iteration := self.advance()) is None:
            pass
        return iteration

    def close(self) -> None:
        """Release the folder to other jobs. A checkpoint that was not settled stays invisible."""
        for threads in (self._copier, self._writer):
            threads.shutdown(wait=True, cancel_futures=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def _held(self) -> WriterLock:
        assert self._lock is not None, "only the first rank holds the lock, until it closes"
        return self._lock

    def _open(self) -> None:
        try:
            self.disk.make_parents(self.directory)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise CheckpointError(
                f"`save` must be a folder that can be written, but is {self.directory}: {error.strerror} "
                f"({error.filename}); choose another"
            ) from error
        self._lock = WriterLock(self.directory, self.disk)
        try:
            recover(self.disk, self.directory)
        except OSError:
            self._lock.release()
            raise

    def _iterations(self) -> list[int]:
        return [pending.iteration for pending in self._pending]

    def _begin(self, folder: Path) -> str:
        """Make the folder of a save; return a random name for the save."""
        self._held.check()
        pending = {hidden_folder(self.directory, iteration, "partial") for iteration in self._iterations()}
        self._tidy(lambda path: path.suffix == ".partial" and path not in pending)
        self.disk.make_folder(folder)
        return secrets.token_hex(8)

    def _write(self, folder: Path, parts: Sequence[Part], beside: str = "") -> Written:
        place = self.context.rank, self.context.world_size
        return write_parts(self.disk, folder, parts, *place, beside)

    def _describe(self, folder: Path, name: str, written: Written) -> Written | list[Tally]:
        """Write this rank's part if there are several ranks; return what `_complete` needs to know of it."""
        rank, ranks = self.context.rank, self.context.world_size
        return written if ranks == 1 else write_part(self.disk, folder, written, name, rank, ranks)

    def _complete(self, folder: Path, pending: _PendingSave, described: Written | list[Tally]) -> None:
        self._held.check()
        self._tidy(lambda path: path.suffix != ".partial")
        facts = {**pending.facts, FOLDER_FACT: self._held.identity}
        if isinstance(described, Written):
            write_description(self.disk, folder, pending.iteration, [described], facts)
        else:
            ranks = self.context.world_size
            write_contents(self.disk, folder, pending.iteration, described, facts, pending.save, ranks)
        self._held.check()
        visible = publish(self.disk, self.directory, pending.iteration)
        self._held.check()
        try:
            prune(self.disk, self.directory, self.retention)
        except OSError as error:
            raise CheckpointError(f"{visible} is saved, but older ones stay: {error}") from error

    def _tidy(self, which: Callable[[Path], bool]) -> None:
        """Clear the leftovers of failed saves."""
        with contextlib.suppress(OSError, CheckpointError):  # a faulty disk; a later save tries again
            self._held.check()
            recover(self.disk, self.directory, which)

    def _forget(self, pending: _PendingSave) -> None:
        self._pending.popleft()
        if self.in_flight:
            self._free.append(pending.staging)


def together(context: ParallelContext, work: Callable[[], object] | None, what: str) -> Any:
    """Run `work` on the ranks that pass some; a failure on one rank is raised on all. Every rank calls this.

    Args:
        context: the ranks.
        work: the work; None on a rank without.
        what: the work in words, for messages, as in "rank 0 could not `what`".

    Returns:
        The first rank's result, on all ranks; it must be JSON.

    Raises:
        CheckpointError: on every rank, in the class that was raised; names the first rank that failed, and
            why.
    """
    result = failure = None
    if work is not None:
        try:
            result = work()
        except CheckpointError as error:
            failure = str(error), type(error).__name__
        except OSError as error:
            failure = f"{type(error).__name__}: {error}", ""
    if (failed := first_value(context.world, failure, context.device)) is not None:
        rank, (why, kind) = failed
        raise _KINDS.get(kind, CheckpointError)(f"rank {rank} could not {what}: {why}")
    answer = first_value(context.world, result if context.rank == 0 else None, context.device)
    return None if answer is None else answer[1]


def _done_here(work: Callable[[], _Result]) -> Future[_Result]:
    future: Future[_Result] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # raised again when the future's result is taken
        future.set_exception(error)
    return future
