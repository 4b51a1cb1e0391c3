"""The latest calls of one process: a ring of slots in a mapped file, which outlives the process.

Gloo ends a process with `abort` when a peer's message does not fit, so a log kept only in the process's own
memory would be lost exactly when it is needed. The log is a flight recorder, like the one PyTorch has for
NCCL.
"""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from megazero.file_lock import try_lock
from megazero.mpu.grid import Ranks
from megazero.mpu.group import Work
from megazero.mpu.watch.report import CallPlace, CallRecord, CallState, Operation

_PREFIX = "megazero-calls-"
_READ_WITHIN = 600.0  # seconds in which other ranks read the log of a dead one
SLOTS = 256
_SLOT_BYTES = 640
_HEADER = struct.Struct("<qqdBH")  # serial number, sequence number, start, state, bytes of text
_STATE_AT = 24
_WIDEST_FIELD, _WIDEST_SITE = 80, 120
_MOST_TEXTS = 4096
_DEEPEST = 48
# A state's index here is its byte in a slot. Enumerations are too slow for something that runs on every call.
_STATES = (CallState.OPEN, CallState.WAITED, CallState.DONE, CallState.RETURNED)
OPEN, WAITED, DONE, RETURNED = range(4)

HERE = str(Path(__file__).parents[1]) + os.sep
_PACKAGES = str(Path(__file__).parents[3]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


class Channel:
    """Calls that all members of the channel number alike: a group's collectives, or messages to one peer.

    Attributes:
        key: the same on all members, and unique to this channel.
        label: the channel's name for people.
        members: the members' world ranks.
        count: how many calls this process has begun.
    """

    __slots__ = ("count", "key", "label", "members")

    def __init__(self, key: str, label: str, members: Ranks):
        self.key = key
        self.label = label
        self.members = members
        self.count = 0


class Call:
    """One call of this process.

    Attributes:
        started: monotonic time.
        state: `OPEN`, `WAITED` or `RETURNED`.
        work: its handle, while it is open.
    """

    __slots__ = ("channel", "sequence", "serial", "started", "state", "text", "work")

    def __init__(self, serial: int, channel: Channel, text: bytes):
        self.serial = serial
        self.channel = channel
        self.sequence = channel.count
        self.text = text
        self.started = time.monotonic()
        self.state = WAITED
        self.work: Work | None = None


class CallLog:
    """The latest calls of this process, and those that have not ended.

    Args:
        folder: where the file is created; None keeps the log in memory, where it is lost with the process.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, folder: str | None = None):
        self.path: str | None = None
        self.pending: dict[int, Call] = {}
        self._serials = itertools.count(1)
        self._latest = 0
        self._texts: dict[tuple[object, ...], bytes] = {}
        self._inside: dict[str, bool] = {}
        self._to_wall = time.time() - time.monotonic()
        size = SLOTS * _SLOT_BYTES
        if folder is None:
            self._ring = mmap.mmap(-1, size)
            return
        remove_orphans(folder)
        handle, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
        try:
            try_lock(handle)  # the mapping holds it, and the system lets go of it with this process
            # The file is written, not just sized: a full disk is an error here, but would be a SIGBUS later.
            os.write(handle, bytes(size))
            self._ring = mmap.mmap(handle, size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(handle)
        self.path = path

    def begin(
        self,
        channel: Channel,
        what: str,
        detail: str | int | None,
        shape: Sequence[int | str] | None,
        dtype: torch.dtype | None,
    ) -> Call:
        """Record a call that starts now; called in the thread that makes the call."""
        # Quick, as all calls come here. Lines are looked up and texts composed once per place: a training
        # loop keeps revisiting them.
        site, asker = self._callers(sys._getframe(1))
        key: tuple[object, ...] = (channel.key, what, detail, shape, dtype)
        if site is not None:
            key = (*key, site.f_code.co_filename, site.f_code.co_firstlineno, site.f_lasti)
        if asker is not None:
            key = (*key, asker.f_code.co_filename, asker.f_code.co_firstlineno, asker.f_lasti)
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) >= _MOST_TEXTS:
                self._texts.clear()
            text = self._texts[key] = _compose(channel, what, detail, shape, dtype, site, asker)
        channel.count += 1
        self._latest = serial = next(self._serials)
        call = Call(serial, channel, text)
        at = serial % SLOTS * _SLOT_BYTES
        # One write: a process that dies here leaves a whole record or none.
        slot = _HEADER.pack(serial, call.sequence, call.started + self._to_wall, WAITED, len(text)) + text
        self._ring[at : at + len(slot)] = slot
        self.pending[serial] = call
        return call

    def _callers(self, frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
        """The first frame outside this package, and the first in another file (not torch) that led there."""
        inside, site = self._inside, None
        for _ in range(_DEEPEST):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if file not in inside:  # a string keeps its hash, so this is quicker than to compare beginnings
                inside[file] = file.startswith((HERE, _TORCH))
            if not inside[file]:
                if site is None:
                    site = frame
                elif file != site.f_code.co_filename:
                    return site, frame
            frame = frame.f_back
        return site, None

    def leave_open(self, call: Call, work: Work) -> None:
        """Record that `call` continues as `work`, and that nobody is waiting for it."""
        call.work = work
        self._set_state(call, OPEN)

    def wait_for(self, call: Call) -> None:
        """Record that somebody is waiting for `call`."""
        self._set_state(call, WAITED)

    def hand_back(self, call: Call) -> None:
        """Record that whoever waited for `call` has gone on, and that the device has yet to finish it."""
        call.work = None  # it holds tensors
        self._set_state(call, RETURNED)

    def finish(self, call: Call) -> None:
        """Record that `call` is done or has been given up."""
        self.pending.pop(call.serial, None)
        self._set_state(call, DONE)

    def records(self) -> list[CallRecord]:
        """The calls in the ring and those pending, oldest first."""
        records = {record.serial: record for record in _decode(self._ring)}
        for call in list(self.pending.values()):
            records[call.serial] = self.record(call)
        return [records[serial] for serial in sorted(records)]

    def record(self, call: Call) -> CallRecord:
        """`call` as a record."""
        return _record(call.serial, call.sequence, call.started + self._to_wall, call.state, call.text)

    def close(self) -> None:
        """Remove the file."""
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)
            self.path = None

    def _set_state(self, call: Call, state: int) -> None:
        call.state = state
        if call.serial > self._latest - SLOTS:  # otherwise another call has taken its slot
            self._ring[call.serial % SLOTS * _SLOT_BYTES + _STATE_AT] = state


def read_log(path: str) -> list[CallRecord]:
    """The calls that another process, possibly dead, recorded in its file, oldest first.

    Raises:
        OSError: it is not there, or is no log of this user's: its path is what others say.
        ValueError, LookupError: it is damaged.
    """
    handle = _open_own(path)
    try:
        return sorted(_decode(os.read(handle, SLOTS * _SLOT_BYTES)), key=lambda record: record.serial)
    finally:
        os.close(handle)


def has_ended(path: str) -> bool:
    """Whether the process that keeps a log has ended, which frees its lock. Raises OSError as `read_log`."""
    handle = _open_own(path)
    try:
        return try_lock(handle)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def remove_orphans(folder: str) -> None:
    """Remove the logs of this user's dead processes that nobody has read: all ranks of a job were killed."""
    for path in Path(folder).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone
            if path.stat().st_mtime < time.time() - _READ_WITHIN and has_ended(str(path)):
                path.unlink()


def _open_own(path: str) -> int:
    """Open a log.

    Raises:
        OSError: it is not there, or it is no log of this user's.
    """
    if not Path(path).name.startswith(_PREFIX):
        raise OSError(errno.EINVAL, "it is no log", path)
    handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    facts = os.fstat(handle)
    if stat.S_ISREG(facts.st_mode) and facts.st_size == SLOTS * _SLOT_BYTES and facts.st_uid == os.getuid():
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is no log", path)


def spell_place(file: str, line: int) -> str:
    """`file:line`: project files relative to the project, others with only the end of the path."""
    if file.startswith(_PACKAGES):
        file = file[len(_PACKAGES) :]
    return f"{os.sep.join(file.split(os.sep)[-4:])}:{line}"


def _compose(
    channel: Channel,
    what: str,
    detail: str | int | None,
    shape: Sequence[int | str] | None,
    dtype: torch.dtype | None,
    site: FrameType | None,
    asker: FrameType | None,
) -> bytes:
    name = what if detail is None else f"{what}({detail})"
    sizes = "" if shape is None else f"[{', '.join(map(str, shape))}] {str(dtype).removeprefix('torch.')}"
    place = "?" if site is None else spell_place(site.f_code.co_filename, site.f_lineno)
    behind = "" if asker is None else spell_place(asker.f_code.co_filename, asker.f_lineno)
    fields = [
        channel.key,
        name[:_WIDEST_FIELD],
        sizes[:_WIDEST_FIELD],
        place[-_WIDEST_SITE:],
        behind[-_WIDEST_SITE:],
    ]
    text = json.dumps(fields).encode()
    if len(text) > _SLOT_BYTES - _HEADER.size:  # it has characters that JSON escapes
        text = json.dumps([*fields[:3], "?", ""]).encode()
    return text


def _decode(ring: mmap.mmap | bytes) -> list[CallRecord]:
    records = []
    for at in range(0, SLOTS * _SLOT_BYTES, _SLOT_BYTES):
        serial, sequence, start, state, length = _HEADER.unpack_from(ring, at)
        if length:
            text = ring[at + _HEADER.size : at + _HEADER.size + length]
            records.append(_record(serial, sequence, start, state, text))
    return records


def _record(serial: int, sequence: int, start: float, state: int, text: bytes) -> CallRecord:
    channel, what, sizes, site, asker = json.loads(text)
    operation, place = Operation(what, sizes), CallPlace(site, asker)
    return CallRecord(serial, channel, sequence, operation, place, start, _STATES[state])
