"""`Watch`: no process of a failed job waits forever, and the first rank that diverged is named.

Each process records its calls (`watch/log.py`). When a call takes too long, or something raises an error, the
process leaves a note in the job's store. All processes then post their reports, one of them makes the
diagnosis (`watch/diagnose.py`) and prints it, and every process ends with an error.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import torch

from megazero.errors import CommunicationError
from megazero.mpu.grid import Ranks
from megazero.mpu.group import Work
from megazero.mpu.threads import helper_thread
from megazero.mpu.tree import pause_of
from megazero.mpu.waits import Waits
from megazero.mpu.watch.diagnose import spell_ranks
from megazero.mpu.watch.failure import FailureDiagnosis, JobFailure
from megazero.mpu.watch.flight_recorder import write_flight_record
from megazero.mpu.watch.heartbeat import Heartbeat
from megazero.mpu.watch.job_notes import JobNotes, SilentKeeperError
from megazero.mpu.watch.log import OPEN, RETURNED, Call, CallLog, Channel
from megazero.mpu.watch.queued import Mark, QueuedCalls
from megazero.mpu.watch.report import Alarm, CallRecord, ChannelRecord, Report
from megazero.mpu.watch.stacks import spell_stack, spell_trace

EXIT_STATUS = 70
_LONGEST_ERROR = 500
_MOST_LOOKS = 4000  # for news of trouble, by all ranks in a second


class ProcessExit:
    """The end of a process of a failed job whose main thread cannot end it."""

    def prepare(self, seconds: float) -> None:
        """End the process after `seconds` and show all stacks, no matter what holds the interpreter then."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)

    def cancel(self) -> None:
        """Undo `prepare`."""
        faulthandler.cancel_dump_traceback_later()

    def end(self) -> None:
        """End the process now, and its children too: the exit handlers that would end them do not run."""
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_STATUS)


@dataclass(frozen=True)
class WatchLimits:
    """The limits of a watch's patience, in seconds.

    Attributes:
        call: how long a call may take; the groups' own timeouts should be longer.
        grace: how long a process has to post its report, and its main thread to end by itself.
        poll: the time between checks of the calls and the notes.
        patience: how long a rank may give no sign of life before it counts as stopped; `call` until
            `Watch.under_way`. None for a job in which nobody listens for them.
    """

    call: float
    grace: float = 10.0
    poll: float = 1.0
    patience: float | None = None


class Watch:
    """Watches the calls of this process, and the job's notes for news from the others.

    In a world of one it starts no threads. Call `close` at the end of the job, on every process.

    Args:
        job_notes: where the processes of the job leave notes.
        rank: this process's rank in the world.
        world_size: number of processes.
        limits: how long it waits for what.
        ending: ends the process if its main thread does not.
        waits: adds up what this process waits in its calls.
        new_mark: makes a mark in the device's queue, where calls return when they are queued there (NCCL);
            None where they return when they are done.

    Attributes:
        listener: called with why the job has failed, in the process that makes the diagnosis; in a thread of
            the watch, or in that of `report`. It must not raise.
    """

    def __init__(
        self,
        job_notes: JobNotes,
        rank: int,
        world_size: int,
        limits: WatchLimits,
        ending: ProcessExit | None = None,
        waits: Waits | None = None,
        new_mark: Callable[[], Mark] | None = None,
    ):
        self.rank = rank
        self.waits = waits or Waits()
        self._limits = limits
        self._ending = ending or ProcessExit()
        self._channels: dict[str, Channel] = {}
        self._lock = threading.Lock()
        self._alarm: tuple[Alarm, str, tuple[str, ...]] | None = None
        self._wake, self._settled, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._summary = "its report did not come through"
        self._threads: list[threading.Thread] = []
        self._log = _open_log() if world_size > 1 else CallLog()
        self._queued = None if new_mark is None else QueuedCalls(self._log, new_mark)
        self.listener: Callable[[JobFailure], None] | None = None
        self._diagnosis = FailureDiagnosis(job_notes, rank, world_size, limits.grace, self._pass_on)
        self._still: Mapping[int, str] = {}
        self._heartbeat = None
        if limits.patience is not None:
            longest = max(limits.patience, limits.call)
            self._heartbeat = Heartbeat(job_notes, rank, world_size, _where(), longest)
        if world_size > 1:
            self._diagnosis.announce(socket.gethostname(), self._log.path)
            atexit.register(self._at_exit)
            self._start(self._watch_calls, self._watch_notes)

    def report(self, error: BaseException) -> None:
        """Tell the other processes that this one ends with `error`; return once the diagnosis is printed."""
        kind = Alarm.COMMUNICATION if isinstance(error, CommunicationError) else Alarm.RAISED
        self._sound(kind, f"{type(error).__name__}: {error}", error.__traceback__)
        self._await_settled()

    def _pass_on(self, failure: JobFailure) -> None:
        if self.listener is not None:
            self.listener(failure)

    def under_way(self) -> None:
        """Note that all ranks have completed a first step, so that heartbeats are due from now on. Before it,
        a rank may hold the interpreter for minutes, e.g. to shuffle the samples of a large corpus.
        """
        patience = self._limits.patience
        if self._heartbeat is not None and patience is not None and self._heartbeat.patience != patience:
            self._heartbeat.expect(patience)

    def leave(self) -> None:
        """Say that this process is about to end, so that nobody misses its heartbeat."""
        if self._heartbeat is not None and self._threads and self._alarm is None:
            with suppress(CommunicationError):  # the others may be gone, with the notes
                self._heartbeat.leave()

    def close(self) -> None:
        """Stop watching. In a failed job, wait for the diagnosis first."""
        if self._closed.is_set():
            return
        self.leave()
        self._await_settled()
        with self._lock:  # an alarm counts before this, and is diagnosed, or not at all
            self._closed.set()
            self._wake.set()
        for thread in self._threads:
            thread.join(self._limits.grace)
        if self._alarm is None and self._threads:
            self._diagnosis.part()
        elif self._alarm is not None:
            self._ending.cancel()
            if self._device_is_behind():  # for good, maybe, and then the end of this process waits for it
                self._ending.prepare(self._limits.grace)
        self._log.close()
        atexit.unregister(self._at_exit)

    # What `WatchedGroup` calls.

    def collective_channel(self, name: str, ranks: Ranks) -> Channel:
        """The channel of a group's collectives."""
        key = f"{name[:40]}#{zlib.crc32(repr(ranks).encode()):08x}"
        return self._channel(key, lambda: Channel(key, f"group `{name}` (ranks {spell_ranks(ranks)})", ranks))

    def message_channel(self, group: Channel, ends: tuple[int, int], tag: int) -> Channel:
        """The channel of messages with `tag` from world rank ``ends[0]`` to ``ends[1]`` over a group."""
        key = f"{group.key}:{ends[0]}>{ends[1]}:{tag}"
        label = f"the messages from rank {ends[0]} to rank {ends[1]} (tag {tag}) over {group.label}"
        return self._channel(key, lambda: Channel(key, label, ends))

    def begin(
        self,
        channel: Channel,
        what: str,
        detail: str | int | None,
        shape: Sequence[int | str] | None,
        dtype: torch.dtype | None,
    ) -> Call:
        """Record a call that starts now.

        Raises:
            CommunicationError: the job has failed.
        """
        if self._alarm is not None:
            raise self._failure()
        return self._log.begin(channel, what, detail, shape, dtype)

    def leave_open(self, call: Call, work: Work) -> None:
        """Record that `call` has been started and continues without anybody waiting for it."""
        self._log.leave_open(call, work)

    def wait_for(self, call: Call) -> None:
        """Record that somebody is now waiting for `call`.

        Raises:
            CommunicationError: the job has failed.
        """
        if self._alarm is not None:
            raise self._failure()
        if not hasattr(call.work, "is_completed"):
            call.started = time.monotonic()  # such a work may only begin now
        self._log.wait_for(call)

    def finish(self, call: Call, *, given_up: bool = False) -> None:
        """Record that `call` has returned to whoever waited for it, or that nobody will wait for it."""
        if self._queued is None or given_up:
            self._log.finish(call)
        else:
            self._queued.add(call)

    def fail(self, call: Call, error: Exception) -> CommunicationError:
        """Note that the job has failed because `call` raised `error`; returns the error to raise."""
        record = self._log.record(call)
        # A group's own error repeats what is known here, so its cause is quoted instead.
        text = f"{record.operation.what} at {record.place} failed: {error.__cause__ or error}"
        self._sound(Alarm.COMMUNICATION, text[:_LONGEST_ERROR])
        return self._failure() if self._threads else CommunicationError(text)

    def record(self, call: Call) -> CallRecord:
        """`call` as the other processes would see it."""
        return self._log.record(call)

    def _channel(self, key: str, make: Callable[[], Channel]) -> Channel:
        channel = self._channels.get(key)
        return self._channels.setdefault(key, make()) if channel is None else channel

    def _failure(self) -> CommunicationError:
        self._await_settled()
        return CommunicationError(f"the job has failed: {self._summary}")

    def _await_settled(self) -> None:
        if self._alarm is not None and threading.current_thread() not in self._threads:
            self._settled.wait(self._diagnosis.longest)

    def _start(self, *bodies: Callable[[], None]) -> None:
        self._threads = [helper_thread(body, body.__name__) for body in bodies]
        for thread in self._threads:
            thread.start()

    def _sound(self, kind: Alarm, text: str, trace: TracebackType | None = None) -> None:
        """Sound an alarm. Only this process's first alarm counts; without threads there is nobody to tell."""
        with self._lock:
            if self._alarm is None and self._threads and not self._closed.is_set():
                self._alarm = kind, text, spell_trace(trace)
                self._wake.set()

    # The two threads.

    def _watch_notes(self) -> None:
        silent, before = 0.0, time.monotonic()
        poll = pause_of(self._limits.poll, self._diagnosis.world_size, _MOST_LOOKS)
        while not self._wake.wait(poll):
            patience = self._limits.call if self._heartbeat is None else self._heartbeat.patience
            # The clock goes on while this process is stopped, but it listens to nobody then.
            now, awake = time.monotonic(), poll + patience / 4
            before, awake = now, min(now - before, awake)
            try:
                failed = self._diagnosis.trouble()
                self._still = {} if self._heartbeat is None or failed else self._heartbeat.turn(awake)
                silent = 0.0
            except SilentKeeperError as error:
                silent += awake
                if silent >= patience:
                    self._sound(Alarm.NOTES, str(SilentKeeperError(error.keeper, silent)))
                continue
            except CommunicationError as error:
                # At the end of a job the store may be gone before this process is.
                if not self._wake.wait(self._limits.grace):
                    self._sound(Alarm.NOTES, str(error))
                return
            if failed:
                self._sound(Alarm.TOLD, "")
            elif self._still:
                self._sound(Alarm.STILL, "; ".join(self._still.values()))

    def _watch_calls(self) -> None:
        while not self._wake.wait(self._limits.poll):
            try:
                overdue = self._overdue()
            except RuntimeError as error:
                # The main thread hears of it at its next call for the device, and knows better where.
                if not self._wake.wait(self._limits.grace):
                    self._sound(Alarm.COMMUNICATION, f"its device failed: {error}"[:_LONGEST_ERROR])
                continue
            if overdue:
                what = self._log.record(overdue).operation.what
                where = " on the device" if overdue.state == RETURNED else ""
                self._sound(Alarm.TIMEOUT, f"{what} took more than {self._limits.call:g} s{where}")
        if self._alarm is None:
            return
        try:
            self._ending.prepare(self._diagnosis.longest + self._limits.grace)
            report = self._report(*self._alarm)
            if self._queued is not None and report.alarm is not Alarm.RAISED:
                self._diagnosis.record = write_flight_record(self.rank)
            self._summary = self._diagnosis.hold(report, self._still)
        except Exception as error:
            traceback.print_exc()
            self._summary = f"{self._alarm[1]}; its diagnosis failed: {type(error).__name__}: {error}"
        finally:
            # Whoever waits for the summary would otherwise wait for as long as a diagnosis may take.
            self._settled.set()
        if not self._closed.wait(self._limits.grace):
            self._log.close()
            self._ending.end()

    def _overdue(self) -> Call | None:
        """The oldest call that has taken too long. Raises RuntimeError if the device has failed."""
        if self._queued is not None:
            self._queued.settle()
        latest = time.monotonic() - self._limits.call
        for call in list(self._log.pending.values()):
            if call.started > latest:
                continue
            if call.state != OPEN:
                return call
            is_completed = getattr(call.work, "is_completed", None)
            if is_completed is not None and not is_completed():
                self._log.wait_for(call)
                return call
        return None

    def _device_is_behind(self) -> bool:
        """Whether the device has yet to finish calls that have returned."""
        if self._queued is None:
            return False
        with suppress(RuntimeError):  # of a device that has failed: it finishes nothing
            self._queued.settle()
        return len(self._queued) > 0

    def _report(self, kind: Alarm, text: str, frames: tuple[str, ...]) -> Report:
        main = threading.main_thread().ident
        assert main is not None, "the main thread has been started"
        self._device_is_behind()
        return Report(
            rank=self.rank,
            where=_where(),
            time=time.time(),
            alarm=kind,
            error=text,
            channels={
                channel.key: ChannelRecord(channel.label, channel.members, channel.count)
                for channel in list(self._channels.values())
            },
            calls=tuple(self._log.records()),
            stack=frames or spell_stack(sys._current_frames().get(main)),
        )

    def _at_exit(self) -> None:
        # The interpreter keeps an uncaught error in sys.last_value.
        if (error := getattr(sys, "last_value", None)) is not None:
            self.report(error)
        self.close()


def _where() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


def _open_log() -> CallLog:
    try:
        return CallLog(tempfile.gettempdir())
    except OSError as error:
        warnings.warn(
            f"the calls of a rank that dies will be lost, because its log has no file: {error}", stacklevel=3
        )
        return CallLog()
