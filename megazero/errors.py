"""The errors a user can meet. Each says what is wrong, with what value, and what to do.

Sentence form: "`thing` must be ... , but is VALUE; do ...". Command line entry points print the
message without a traceback and exit with `exit_code`.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

_CLOSED_PIPE = 128 + 13  # SIGPIPE


def printable(text: str, kept: str = "\n") -> str:
    """`text` with escapes for what a terminal would obey or hide instead of showing it, but for `kept`.

    Messages quote files, which may hold anything: control sequences, marks that reverse the direction of
    writing, halves of surrogate pairs, which no stream could encode.
    """
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
    """The configuration is refused for what the host lacks, on all its ranks alike; the first one says so."""


class DataError(MegazeroError):
    """A corpus, dataset, index or tokenizer file is missing, damaged or unsuitable."""


class CheckpointError(MegazeroError):
    """A checkpoint is missing, damaged or belongs to another model or layout."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint does not hold what was written: files are missing, cut, changed or from another one."""


class LostFolderError(CheckpointError):
    """A run's folder has become another's while the run saved there."""


class OffloadError(MegazeroError):
    """Memory or a disk that state is offloaded to is full, gone or broken."""


class CommunicationError(MegazeroError):
    """A collective call failed, timed out or was made with mismatching arguments."""


class LaunchError(MegazeroError):
    """A launch could not begin: hosts are not reachable, or what they need to meet is not there."""


class HostWaitError(MegazeroError):
    """A training step made the host wait for the device where it must not."""


class NumericsError(MegazeroError):
    """Training met values it cannot continue from, such as a loss scale at its floor."""


def exit_status(work: Callable[[], object]) -> int:
    """Do `work`, print the message of an error, and return the process's status.

    It is no fault of the work if the reader of its output stops reading, as `head` does: the status is then
    that of a process that a closed pipe has ended, and nothing is printed.
    """
    try:
        work()
        sys.stdout.flush()
    except MegazeroError as error:
        if not isinstance(error, HostConfigError) or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout):
            raise
        return _CLOSED_PIPE
    return 0


def _nobody_reads(stream: TextIO) -> bool:
    """Whether the reader of a stream has gone; what is still to be written is then dropped."""
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return gone
