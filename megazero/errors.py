"""The errors that a user can fix. Each says what is wrong, with what value, and what to do.

The sentence form is "`thing` must be X, but is VALUE; do Y." Command line entry points print the message
without a traceback, and exit with `exit_code`.
"""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable
from typing import TextIO

_MIRROR = re.compile(r"/[^\s`'\"]*?/megazero/mirror/([a-z0-9]+)/")
"""The beginning of a path in the mirror of a URL; see checkpoint/remote."""
_CLOSED_PIPE = 128 + 13  # SIGPIPE


def printable(text: str, kept: str = "\n") -> str:
    """Escape the characters that a terminal would obey or hide, except those in `kept`.

    A path in the mirror of a URL becomes the URL.

    Messages quote files, which may hold control sequences, marks that reverse the direction of writing, or
    halves of surrogate pairs, which no stream can encode.
    """
    text = _MIRROR.sub(r"\1://", text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


class MegazeroError(Exception):
    """Base of all errors that the user can fix. `exit_code` is the process status; messages are printable."""

    exit_code = 1

    def __init__(self, *args: object):
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(MegazeroError):
    """The configuration is refused. `violations` lists every reason, not only the first, each in one line."""

    exit_code = 2

    def __init__(self, violations: str | list[str]):
        if isinstance(violations, str):
            self.violations = [printable(violations)]
        else:
            self.violations = [printable(violation, kept="") for violation in violations]
        super().__init__("\n".join(self.violations))


class HostConfigError(ConfigError):
    """The host lacks what the configuration needs. All its ranks raise this; only local rank 0 prints it."""


class DataError(MegazeroError):
    """A corpus, dataset, index or tokenizer file is missing, damaged or unsuitable."""


class CheckpointError(MegazeroError):
    """A checkpoint is missing, damaged or belongs to another model or layout."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, truncated, changed, or from another checkpoint."""


class LostFolderError(CheckpointError):
    """Another run has taken over the folder in which this run saves its checkpoints."""


class StorageError(MegazeroError):
    """An object store, or an object in it, is missing, out of reach, damaged or refused."""


class OffloadError(MegazeroError):
    """The memory or disk that holds offloaded state is full, missing or broken."""


class CommunicationError(MegazeroError):
    """A collective call failed, timed out or was made with mismatching arguments."""


class LaunchError(MegazeroError):
    """A launch could not begin: hosts are unreachable, or lack what ranks need to find each other."""


class HostWaitError(MegazeroError):
    """A training step made the host wait for the device at a place that must not wait."""


class NumericsError(MegazeroError):
    """Training cannot continue from the values that it has, such as a loss scale at its minimum."""


def exit_status(work: Callable[[], object]) -> int:
    """Do `work`, print the message of an error, and return the process's status: `work`'s own if an int.

    If the reader of standard output has gone, as `head` goes, nothing is printed, and the status is that of
    a process ended by SIGPIPE.
    """
    try:
        status = work()
        sys.stdout.flush()
    except MegazeroError as error:
        if not isinstance(error, HostConfigError) or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout):
            raise
        return _CLOSED_PIPE
    return status if isinstance(status, int) else 0


def _nobody_reads(stream: TextIO) -> bool:
    """Whether a stream's reader has gone; if so, send the rest to /dev/null, for the flush at exit."""
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return gone
