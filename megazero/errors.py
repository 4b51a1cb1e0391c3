"""The errors a user can meet. Each says what is wrong, with what value, and what to do.

Sentence form: "`thing` must be ... , but is VALUE; do ...". Command line entry points print the
message without a traceback and exit with `exit_code`.
"""

from __future__ import annotations


class MegazeroError(Exception):
    """Base of all errors that the user can fix. `exit_code` is the process status."""

    exit_code = 1


class ConfigError(MegazeroError):
    """The configuration is refused. `violations` lists every reason, not only the first."""

    exit_code = 2

    def __init__(self, violations: str | list[str]):
        self.violations = [violations] if isinstance(violations, str) else list(violations)
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
