"""How long each file of tests takes: `tests/durations.txt`, which orders the suite and chooses its fast tier.

bash scripts/test.sh --write-durations               # refresh all rows
bash scripts/test.sh tests/data --write-durations    # those of the files that run
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests/durations.txt"
HEAD = """\
# Seconds that the tests of a file take together in the default suite, on one of two workers.
# Written by `bash scripts/test.sh --write-durations`; a file without a row is new.
"""


def all_test_files() -> set[str]:
    """All files of tests, from the root."""
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}


def read_durations(table: Path = TABLE) -> dict[str, float]:
    """Seconds by file, from the root."""
    rows = [line.split() for line in table.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    return {name: float(seconds) for seconds, name in rows}


def write_durations(seconds: Mapping[str, float], files: set[str], table: Path = TABLE) -> None:
    """Put these seconds into the table; rows of files that are not there any more go."""
    kept = read_durations(table) if table.exists() else {}
    rows = {name: value for name, value in {**kept, **seconds}.items() if name in files}
    lines = [f"{rows[name]:7.1f} {name}\n" for name in sorted(rows)]
    table.write_text(HEAD + "".join(lines), encoding="utf-8")


class DurationsWriter:
    """A plugin that adds up what tests report, from all workers, and writes the table at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK:
            write_durations(self.seconds, all_test_files())
