"""Which tests are fast: what a commit waits for, `bash scripts/test.sh --fast`.

All tests of a file are, if they take 0.6 s or less together (`tests/durations.txt`; a file without a row
is new, and runs), but for those that need processes. Of the other files those are that are marked `fast`:
they stand for the kinds of layouts, of ranks and of runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.durations import ROOT, read_durations

SECONDS = 0.6
MARKED = re.compile(r"\bmark\.fast\b|\bSWEEP\.parametrize\b")


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
        marks = item.keywords
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
