"""Opening a `SharedGroup`: either all members agree that they can share memory, or all keep their group."""

from __future__ import annotations

import errno
import importlib
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

NATIVE: Any  # csrc/mpu, which has no type annotations
try:
    NATIVE = importlib.import_module("megazero.mpu._native")
except ImportError:
    NATIVE = None

FOLDER = Path("/dev/shm")
SLOT_BYTES = 1 << 20


def open_shared(
    base: TorchGroup, timeout: timedelta, *, slot_bytes: int = SLOT_BYTES
) -> SharedGroup | TorchGroup:
    """Connect the ranks of `base` (Gloo) through shared memory, or return `base` and warn why that cannot be.

    Every member calls this. The memory has a name only while it is being opened, so nothing is left of it
    when the last member ends, however it ends.

    Args:
        base: the underlying group, used for everything that is not done in shared memory.
        timeout: how long a call waits for another member.
        slot_bytes: size of the chunks in which collectives move data, two per member; a multiple of the page
            size, at least 64 pages.

    Raises:
        CommunicationError: the members could not be reached through `base`.
    """
    reason = _obstacle(base)
    if reason is None:
        link, reason = _connect(base, slot_bytes, timeout)
        if reason is None:
            return SharedGroup(base, link)
    if base.rank == 0:
        warnings.warn(f"ranks of this host talk over Gloo, which is slower: {reason}", stacklevel=2)
    return base


def _obstacle(base: TorchGroup) -> str | None:
    """Say why the members cannot share memory, alike on each of them; None if no obstacle is known."""
    missing = (
        "megazero.mpu._native is not built; install a C++17 compiler and run `pip install -e .` on Linux"
    )
    mine = {"host": _host(), "trouble": missing if NATIVE is None else None}
    everyone = gather_values(base, mine)
    hosts = sorted({answer["host"] for answer in everyone})
    if len(hosts) > 1:
        return f"they are on {len(hosts)} hosts"
    troubles = [answer["trouble"] for answer in everyone if answer["trouble"]]
    if not troubles and base.size > NATIVE.MOST_RANKS:
        return f"a group in shared memory has at most {NATIVE.MOST_RANKS} members, not {base.size}"
    return troubles[0] if troubles else None


def _host() -> str:
    """A string that tells hosts apart: names may repeat, and containers of one kernel may share no memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _connect(base: TorchGroup, slot_bytes: int, timeout: timedelta) -> tuple[Any, str | None]:
    """This member's link to the memory that the first member makes, or why some member has no link."""
    path, file, link, trouble = None, None, None, None
    try:
        if base.rank == 0:
            path = FOLDER / f"megazero-{uuid.uuid4()}"
            try:
                file = _create(path, base.size, slot_bytes)
            except OSError as error:
                trouble = _explain(error)
        name, trouble = gather_values(base, [path and path.name, trouble])[0]
        if trouble is None:
            try:
                file = os.open(FOLDER / name, os.O_RDWR) if file is None else file
                link = NATIVE.Link(file, base.rank, list(base.ranks), slot_bytes, timeout.total_seconds())
            except (OSError, RuntimeError) as error:
                trouble = _explain(error)
        troubles = [answer for answer in gather_values(base, trouble) if answer is not None]
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
        if link is None and file is not None:
            os.close(file)
    if troubles and link is not None:
        link.close()
    return link, troubles[0] if troubles else None


def _create(path: Path, members: int, slot_bytes: int) -> int:
    """Create the group's file, with all of its memory.

    Raises:
        OSError: the folder does not exist, or has too little room.
    """
    needed = NATIVE.segment_end(members, slot_bytes)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        space = os.fstatvfs(file)
        room = space.f_bavail * space.f_frsize
        if room < needed:
            raise OSError(errno.ENOSPC, f"{room >> 20} MiB are free, but {needed >> 20} MiB are needed")
        os.posix_fallocate(file, 0, needed)
    except OSError:
        os.close(file)
        path.unlink()
        raise
    return file


def _explain(error: Exception) -> str:
    return f"{FOLDER} cannot be used ({error})"
