"""File locks (flock): one process at a time holds a lock, and the system frees it when the process ends.

filelock takes them. Its `FileLock` would not do for their holders, who name themselves to whoever is refused,
delete the file or check that it is still there, keep a lock in a mapping, and go on where there are no locks.
"""

from __future__ import annotations

import errno
import os
import platform

from filelock import lock_descriptor

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def try_lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file for this process; `wait` for it, if another process holds the lock.

    Returns:
        Whether the file is locked now: False if the system or the file system has no locks.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the system refuses.
    """
    try:
        if lock_descriptor(descriptor, blocking=wait, poll_interval=0.2):
            return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock")


def this_process() -> str:
    """Name this process and host; a lock's holder writes it into the file for whoever is refused the lock."""
    return f"process {os.getpid()} on {platform.node()}"
