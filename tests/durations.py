"""How long tests take: `tests/durations.txt`, which orders the suite and chooses its tiers.

bash scripts/test.sh --write-durations               # refresh all rows
bash scripts/test.sh tests/data --write-durations    # those of the files that run
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests/durations.txt"
LONG_CASE = 0.1  # seconds from which a case of a parametrized test has a row
HEAD = """\
# Seconds that the tests of a file take together in the default suite, on one of two workers; and the seconds
# of one case of a test with parameters, `FILE::TEST`, from 0.1 on.
# Written by `bash scripts/test.sh --write-durations`; a file without a row is new.
"""


def all_test_files() -> set[str]:
    """All files of tests, from the root."""
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}


def read_rows(table: Path = TABLE) -> dict[str, float]:
    """Seconds of files, and of the cases of tests, by name."""
    rows = [line.split() for line in table.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    return {name: float(seconds) for seconds, name in rows}


def read_durations(table: Path = TABLE) -> dict[str, float]:
    """Seconds by file, from the root."""
    return {name: seconds for name, seconds in read_rows(table).items() if "::" not in name}


def read_cases(table: Path = TABLE) -> dict[str, float]:
    """Seconds of a case, by test."""
    return {name: seconds for name, seconds in read_rows(table).items() if "::" in name}


def write_durations(
    seconds: Mapping[str, float],
    cases: Mapping[str, float],
    files: set[str],
    table: Path = TABLE,
    partly: Collection[str] = (),
) -> None:
    """Put the seconds of files, and of cases by test, into the table; of files that ran, all rows are new.

    Rows of files that are not there any more go. Of tests that ran `partly`, a case takes what it took before
    if that was more: otherwise one whose long cases are left out would run them the next time.
    """
    before = read_rows(table) if table.exists() else {}
    kept = {name: value for name, value in before.items() if name.partition("::")[0] not in seconds}
    cases = {n: max(value, before.get(n, 0.0) if n in partly else 0.0) for n, value in cases.items()}
    long = {name: value for name, value in cases.items() if value >= LONG_CASE}
    rows = {name: value for name, value in {**kept, **seconds, **long}.items() if _file(name) in files}
    lines = [f"{rows[name]:7.{2 if '::' in name else 1}f} {name}\n" for name in sorted(rows)]
    table.write_text(HEAD + "".join(lines), encoding="utf-8")


def _file(name: str) -> str:
    return name.partition("::")[0]


class DurationsWriter:
    """A plugin that adds up what tests report, from all workers, and writes the table at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._cases: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._partly: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[_file(report.nodeid)] += report.duration
        test, parameters, _ = report.nodeid.partition("[")
        if parameters and report.skipped:
            self._partly.add(test)
        elif parameters:
            self._cases[test][report.nodeid] += report.duration

    @property
    def cases(self) -> dict[str, float]:
        """Mean seconds of a case, by test."""
        return {test: sum(of.values()) / len(of) for test, of in self._cases.items()}

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK:
            write_durations(self.seconds, self.cases, all_test_files(), partly=self._partly)
