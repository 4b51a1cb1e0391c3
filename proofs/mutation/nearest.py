"""Which tests to run for a fault, nearest and fastest first.

A `MeasuredTest` says how long a test takes and which functions it runs. The tests for a fault are those
that run the function it lies in: first those of files that name the module or lie in the package's test
folder, the fastest ahead; then the oracle; then the others.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from proofs.mutation.faults import Fault

ORACLE = "oracle"  # the folder of tests that knows nothing of the package
START = 2.0  # seconds that a child needs before its first test
FIRST_SECONDS, FIRST_FILES = 4.0, 4  # of the first batch, where most faults are found


@dataclass(frozen=True, eq=False)
class MeasuredTest:
    """One test as it was without a fault."""

    name: str
    seconds: float
    functions: frozenset[tuple[str, str]]

    @property
    def file(self) -> str:
        """Its file, from the project's root."""
        return self.name.partition("::")[0]


class MeasuredTests:
    """All tests that passed, as measured; kept in a folder, as one JSON file per file of tests."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self, root: Path, folders: Iterable[str] | None = None) -> list[str]:
        """Files in these folders of tests, or in all, that are new or changed; gone files are forgotten."""
        today = {path.relative_to(root).as_posix(): digest(path) for path in test_files(root)}
        for kept in self.folder.iterdir():
            if kept not in map(self._kept, today):
                kept.unlink()
        if folders is not None:
            today = {name: text for name, text in today.items() if name.split("/")[1] in folders}
        return [name for name, text in today.items() if self._digest(name) != text]

    def add(self, name: str, text: str, tests: dict[str, dict], functions: list) -> None:
        """Keep what running a test file showed. A test that did not pass can find no fault."""
        kept = {
            test: {"seconds": entry["seconds"], "functions": [functions[i] for i in entry["hits"]]}
            for test, entry in tests.items()
            if entry["passed"] and "hits" in entry
        }
        self._kept(name).write_text(json.dumps({"digest": text, "tests": kept}))

    @property
    def tests(self) -> list[MeasuredTest]:
        """All of them."""
        return [
            MeasuredTest(name, entry["seconds"], frozenset(tuple(each) for each in entry["functions"]))
            for kept in sorted(self.folder.iterdir())
            for name, entry in json.loads(kept.read_text())["tests"].items()
        ]

    def like_others(self, names: Iterable[str]) -> list[MeasuredTest]:
        """Tests that were not measured, each as the measured cases of it are together, or its whole file."""
        alike: dict[str, list[MeasuredTest]] = defaultdict(list)
        for test in self.tests:
            alike[test.name.partition("[")[0]].append(test)
            alike[test.file].append(test)
        made = []
        for name in names:
            own, _, _ = name.partition("[")
            others = alike.get(own) or alike.get(own.partition("::")[0], [])
            if others:
                seconds = sum(test.seconds for test in others) / len(others)
                made.append(MeasuredTest(name, seconds, frozenset().union(*(x.functions for x in others))))
        return made

    def _kept(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '.')}.json"

    def _digest(self, name: str) -> str | None:
        kept = self._kept(name)
        return json.loads(kept.read_text())["digest"] if kept.exists() else None


def digest(path: Path) -> str:
    """What tells one text of a file from another."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def test_files(root: Path) -> list[Path]:
    """The files of tests."""
    return sorted((root / "tests").rglob("test_*.py"))


class Nearest:
    """Chooses the tests for faults.

    Args:
        root: the project.
        tests: as measured.
        budget: seconds of tests, as measured without a fault, that one fault may cost in each of its stages.
    """

    def __init__(self, root: Path, tests: Iterable[MeasuredTest], budget: float):
        self.budget = budget
        self._tests = list(tests)
        self._by_function: dict[tuple[str, str], set[MeasuredTest]] = defaultdict(set)
        self._by_file: dict[str, set[MeasuredTest]] = defaultdict(set)
        for test in self._tests:
            for path, function in test.functions:
                self._by_function[path, function].add(test)
                self._by_file[path].add(test)
        self._names = {path.relative_to(root).as_posix(): _modules_named(path) for path in test_files(root)}

    def batches(self, fault: Fault) -> list[list[MeasuredTest]]:
        """The tests for a fault, in batches to be run one after the other until one fails."""
        # The body of a class or module runs once, at import, unseen: all tests of the file's functions then.
        running = self._by_function.get((fault.path, fault.edit.function))
        running = set(running or self._by_file[fault.path])
        distance = {test: self._distance(test, fault) for test in self._tests}
        # What is kept from call to call runs in one test and serves others, so those of the mirror all count.
        near = [
            test for test in self._tests if distance[test] == 0 or (distance[test] < 3 and test in running)
        ]
        near = near or [test for test in self._tests if distance[test] < 3]
        near.sort(key=lambda test: (test not in running, distance[test] == 2, test.seconds))
        far = [test for test in self._tests if distance[test] == 3 and test in running]
        far.sort(key=lambda test: (not test.file.startswith(f"tests/{ORACLE}/"), test.seconds))
        first = _within([test for test in near if test in running], FIRST_SECONDS, FIRST_FILES)
        rest = [test for test in near if test not in first]
        return [batch for batch in (first, _within(rest, self.budget), _within(far, self.budget)) if batch]

    def _distance(self, test: MeasuredTest, fault: Fault) -> int:
        """0: it mirrors the module, 1: it names it, 2: it lies in the package's folder, 3: elsewhere."""
        mirror = "tests/" + fault.path.removeprefix("megazero/")
        folder, _, file = mirror.rpartition("/")
        if test.file == f"{folder}/test_{file}" or test.file.startswith(f"{folder}/test_{file[:-3]}"):
            return 0
        if fault.path.removesuffix(".py").replace("/", ".") in self._names.get(test.file, ()):
            return 1
        return 2 if test.file.startswith(f"tests/{fault.package}/") else 3


def _modules_named(path: Path) -> set[str]:
    """The modules that a file imports or imports from, and names written out, as of a monkeypatch."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            named |= {each.name for each in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("megazero.")
        ):
            named.add(node.value)
    return named


def _within(tests: list[MeasuredTest], seconds: float, files: int | None = None) -> list[MeasuredTest]:
    """As many of them, from the front, as fit; those of one file together."""
    chosen: dict[str, list[MeasuredTest]] = {}
    left = seconds
    for test in tests:
        full = files is not None and test.file not in chosen and len(chosen) >= files
        if not full and (test.seconds <= left or not chosen):
            chosen.setdefault(test.file, []).append(test)
            left -= test.seconds
    return [test for each in chosen.values() for test in each]
