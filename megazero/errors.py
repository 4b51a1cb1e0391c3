"""The errors a user can meet. Each says what is wrong, with what value, and what to do.

Sentence form: "`thing` must be ... , but is VALUE; do ...". Command line entry points print the
message without a traceback and exit with `exit_code`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


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


class DataError(MegazeroError):
    """A corpus, dataset, index or tokenizer file is missing, damaged or unsuitable."""


class CheckpointError(MegazeroError):
    """A checkpoint is missing, damaged or belongs to another model or layout."""


class DamagedCheckpointError(CheckpointError):
    """What is stored is not what was written: files are missing, cut, changed or from another checkpoint."""


class CommunicationError(MegazeroError):
    """A collective call failed, timed out or was made with mismatching arguments."""


class NumericsError(MegazeroError):
    """Training met values it cannot continue from, such as a loss scale at its floor."""


def exit_status(work: Callable[[], object]) -> int:
    """Do `work`, and print the message of an error; returns the process's status."""
    try:
        work()
    except MegazeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
