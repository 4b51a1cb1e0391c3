"""Opening a `SharedGroup`: all members agree that they can share memory, or all keep the group they have."""

from __future__ import annotations

import errno
import os
import socket
import uuid
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from megazero.mpu.messages import gather_values
from megazero.mpu.shared_group import SharedGroup
from megazero.mpu.torch_group import TorchGroup

try:
    from megazero.mpu import _native as NATIVE
except ImportError:
    NATIVE = None

FOLDER = Path("/dev/shm")
SLOT_BYTES = 1 << 20
RING_BYTES = 8 << 20


def open_shared(
    base: TorchGroup, timeout: timedelta, *, slot_bytes: int = SLOT_BYTES, ring_bytes: int = RING_BYTES
) -> SharedGroup | TorchGroup:
    """The ranks of `base` (Gloo) over shared memory, or `base` itself where they cannot; a warning says why.

    Every member calls this. The memory has a name only while it is being opened: nothing is left of it when
    the last member ends, however it ends.

    Args:
        base: the group below, for all that is not done in shared memory.
        timeout: how long a call waits for another member.
        slot_bytes: size of the chunks in which collectives pass, two per member; whole pages, at least 64.
        ring_bytes: what can be on its way from one member to another before that one takes it, in memory that
            is taken with the first message between them; whole pages.

    Raises:
        CommunicationError: the members could not be reached through `base`.
    """
    reason = _obstacle(base)
    if reason is None:
        link, reason = _connect(base, slot_bytes, ring_bytes, timeout)
        if reason is None:
            return SharedGroup(base, link)
    if base.rank == 0:
        warnings.warn(f"ranks of this host talk over Gloo, which is slower: {reason}", stacklevel=2)
    return base


def _obstacle(base: TorchGroup) -> str | None:
    """Why the members cannot share memory, the same on each; None if nothing is known against it."""
    missing = (
        "megazero.mpu._native is not built; install a C++17 compiler and run `pip install -e .` on Linux"
    )
    mine = {"host": _host(), "trouble": missing if NATIVE is None else None}
    everyone = gather_values(base, mine)
    hosts = sorted({each["host"] for each in everyone})
    if len(hosts) > 1:
        return f"they are on {len(hosts)} hosts"
    troubles = [each["trouble"] for each in everyone if each["trouble"]]
    if not troubles and base.size > NATIVE.MOST_RANKS:
        return f"a group in shared memory has at most {NATIVE.MOST_RANKS} members, this one has {base.size}"
    return troubles[0] if troubles else None


def _host() -> str:
    """What tells hosts apart: a name may occur twice, and containers of one kernel may not share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _connect(
    base: TorchGroup, slot_bytes: int, ring_bytes: int, timeout: timedelta
) -> tuple[Any, str | None]:
    """This member's link to memory that the first one makes, or why some member has none."""
    sizes = (slot_bytes, ring_bytes)
    path, file, link, trouble = None, None, None, None
    try:
        if base.rank == 0:
            path = FOLDER / f"megazero-{uuid.uuid4()}"
            try:
                file = _create(path, base.size, sizes)
            except OSError as error:
                trouble = _explain(error)
        name, trouble = gather_values(base, [path and path.name, trouble])[0]
        if trouble is None:
            try:
                file = os.open(FOLDER / name, os.O_RDWR) if file is None else file
                link = NATIVE.Link(file, base.rank, list(base.ranks), *sizes, timeout.total_seconds())
            except (OSError, RuntimeError) as error:
                trouble = _explain(error)
        troubles = [each for each in gather_values(base, trouble) if each is not None]
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
        if link is None and file is not None:
            os.close(file)
    if troubles and link is not None:
        link.close()
    return link, troubles[0] if troubles else None


def _create(path: Path, members: int, sizes: tuple[int, int]) -> int:
    """A new file for the group, with memory for all but the rings.

    Raises:
        OSError: there is no such folder, or too little room in it.
    """
    needed = NATIVE.slots_end(members, *sizes)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        space = os.fstatvfs(file)
        room = space.f_bavail * space.f_frsize
        wanted = needed + 2 * members * sizes[1]  # messages mostly go to two neighbours
        if room < wanted:
            raise OSError(errno.ENOSPC, f"{room >> 20} MiB are free, {wanted >> 20} MiB are needed")
        os.truncate(file, NATIVE.segment_end(members, *sizes))
        os.posix_fallocate(file, 0, needed)
    except OSError:
        os.close(file)
        path.unlink()
        raise
    return file


def _explain(error: Exception) -> str:
    return f"{FOLDER} cannot be used ({error})"
