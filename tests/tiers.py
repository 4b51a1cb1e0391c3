"""Which tests run when: the default suite, and what a commit waits for, `bash scripts/test.sh --fast`.

The default suite runs all tests but those marked `slow`. Of a test with parameters it runs as many cases
as take `CASES_SECONDS` (`tests/durations.txt`), evenly spread, at least two of those that take less each, and
one of others; `@pytest.mark.seconds(20)` asks for more. `--slow` runs everything.

All tests of a file are fast, if they take 0.6 s or less together (`tests/durations.txt`; a file without a row
is new, and runs), but for those that need processes. Of the other files those are that are marked `fast`:
they stand for the kinds of layouts, of ranks and of runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.durations import ROOT, read_cases, read_durations

CASES_SECONDS = 1.6
SECONDS = 0.6
MARKED = re.compile(r"\bmark\.fast\b|\bSWEEP\.parametrize\b")


def left_for_slow(
    items: Sequence[pytest.Item], seconds: Mapping[str, float] | None = None
) -> list[pytest.Item]:
    """The cases that the default suite leaves out because others of the same test take its time.

    Args:
        items: collected, those marked `slow` aside.
        seconds: of a case, by test; by default those of the table.
    """
    seconds = read_cases() if seconds is None else seconds
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        test, parameters, _ = item.nodeid.partition("[")
        if parameters and test in seconds:
            tests[test].append(item)
    left: list[pytest.Item] = []
    for test, cases in tests.items():
        asked = cases[0].get_closest_marker("seconds")
        most = asked.args[0] if asked else CASES_SECONDS
        count = max(1 if seconds[test] > CASES_SECONDS else 2, int(most / seconds[test]))
        kept = {round(place * (len(cases) - 1) / max(count - 1, 1)) for place in range(count)}
        if count < len(cases):
            left += [
                x for place, x in enumerate(cases) if not (place in kept or x.get_closest_marker("fast"))
            ]
    return left


class FastTier:
    """A plugin that leaves out what is not fast, most of it before it is imported."""

    def __init__(self) -> None:
        self._seconds = read_durations()

    def is_quick(self, name: str) -> bool:
        """Whether all tests of this file are fast."""
        return self._seconds.get(name, 0.0) <= SECONDS

    def has_fast(self, path: Path) -> bool:
        """Whether some tests of this file are."""
        quick = self.is_quick(path.relative_to(ROOT).as_posix())
        return quick or MARKED.search(path.read_text(encoding="utf-8")) is not None

    def is_fast(self, item: pytest.Item) -> bool:
        """Whether this test is."""
        # Keywords would have the names of folders among them, that of the checkout too.
        marks = {mark.name for mark in item.iter_markers()}
        quick = self.is_quick(item.path.relative_to(ROOT).as_posix()) and "gloo" not in marks
        return ("fast" in marks or quick) and "slow" not in marks

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.name.startswith("test_") and collection_path.suffix == ".py":
            return None if self.has_fast(collection_path) else True
        return None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if not self.is_fast(item)]
        items[:] = [item for item in items if self.is_fast(item)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
