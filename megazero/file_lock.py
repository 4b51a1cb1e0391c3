"""File locks (flock): one process at a time holds a lock, and the system frees it when the process ends."""

from __future__ import annotations

import errno
import os
import platform
import sys

if sys.platform != "win32":
    import fcntl

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process, without waiting.

    Returns:
        Whether the file is locked now: False if the system or the file system has no locks.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the system refuses.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def this_process() -> str:
    """Name this process and host; a lock's holder writes it into the file for whoever is refused the lock."""
    return f"process {os.getpid()} on {platform.node()}"
