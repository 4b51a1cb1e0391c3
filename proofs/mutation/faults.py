"""Faults by name, a spread sample of them, and the list of those known to change nothing."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from proofs.mutation.rules import Edit, compiles, edits_of, setting_defaults

PACKAGES = (
    "mpu",
    "ops",
    "layers",
    "moe",
    "models",
    "optim",
    "zero",
    "pipeline",
    "data",
    "data_efficiency",
    "checkpoint",
    "train",
    "inference",
    "plan",
    "launch",
    "commands",
    "deepspeed",
)
GPU = "needs a GPU"  # begins the reason of a fault that no test of a machine without one can see


@dataclass(frozen=True)
class Key:
    """A fault's name, which outlives changes elsewhere in its file.

    Attributes:
        path: the file, from the project's root.
        function: the function or class.
        rule: the rule that made it.
        before, after: the changed lines, spaces made single; `before` ends in " [2]" if the function has the
            same fault on a second place, and so on.
    """

    path: str
    function: str
    rule: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path} {self.function} {self.rule}\n- {self.before}\n+ {self.after}"


@dataclass(frozen=True)
class Fault:
    """One edit of one file of the project; `number` counts those that read the same."""

    path: str
    source: str
    edit: Edit
    number: int = 1

    @property
    def faulty(self) -> str:
        """The file's text with the fault."""
        return self.edit.apply(self.source)

    @property
    def key(self) -> Key:
        """What names it."""
        start, end = self.edit.start, self.edit.end
        first = self.source.rfind("\n", 0, start) + 1
        last = self.source.find("\n", end)
        last = last if last >= 0 else len(self.source)
        before = self.source[first:last]
        after = self.source[first:start] + self.edit.text + self.source[end:last]
        names = (self.path, self.edit.function, self.edit.rule)
        which = [f"[{self.number}]"] if self.number > 1 else []
        return Key(*names, " ".join([*before.split(), *which]), " ".join(after.split()))

    @property
    def package(self) -> str:
        """The package of megazero it lies in."""
        return self.path.split("/")[1]

    def diff(self) -> str:
        """What a reader wants to see of it."""
        lines = difflib.unified_diff(
            self.source.splitlines(), self.faulty.splitlines(), self.path, self.path, lineterm="", n=1
        )
        return "\n".join(list(lines)[2:])


def all_faults(root: Path, packages: Iterable[str] = PACKAGES) -> list[Fault]:
    """Every fault that the rules find in these packages."""
    defaults = setting_defaults(
        {
            path.name: path.read_text(encoding="utf-8")
            for path in sorted(root.glob("megazero/config/tree/*.py"))
        }
    )
    faults = []
    for package in packages:
        for path in sorted((root / "megazero" / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            name = path.relative_to(root).as_posix()
            faults += _numbered([Fault(name, source, edit) for edit in edits_of(source, defaults)])
    return faults


def _numbered(faults: Iterable[Fault]) -> Iterator[Fault]:
    seen: Counter[Key] = Counter()
    for fault in faults:
        seen[fault.key] += 1
        yield replace(fault, number=seen[fault.key])


def sample(faults: Iterable[Fault], count: int, seed: int) -> list[Fault]:
    """`count` faults, spread evenly over the packages, within one over its rules, within those over files.

    A fault's place in the draw depends on the seed and its own name, so that a change of one function leaves
    the rest of the sample as it was. No line is drawn twice.
    """
    by_package: dict[str, list[Fault]] = defaultdict(list)
    for fault in sorted(faults, key=lambda fault: _rank(fault, seed)):
        by_package[fault.package].append(fault)
    draws = [_draw(of_package) for _, of_package in sorted(by_package.items())]
    chosen: list[Fault] = []
    while draws and len(chosen) < count:
        draws = [(draw, fault) for draw in draws if (fault := next(draw, None)) is not None]
        chosen += [fault for _, fault in draws]
        draws = [draw for draw, _ in draws]
    return chosen[:count]


def _rank(fault: Fault, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\n{fault.key}\n{fault.edit.text}".encode()).digest()


def _draw(faults: list[Fault]) -> Iterator[Fault]:
    """These again: always one of the rule, then of the file, that has had the fewest."""
    rules: dict[str, int] = dict.fromkeys((fault.edit.rule for fault in faults), 0)
    files: dict[str, int] = dict.fromkeys((fault.path for fault in faults), 0)
    lines: set[tuple[str, int]] = set()
    left = list(faults)
    while left:
        fault = min(left, key=lambda fault: (rules[fault.edit.rule], files[fault.path]))
        if not compiles(fault.faulty):
            left.remove(fault)
            continue
        rules[fault.edit.rule] += 1
        files[fault.path] += 1
        lines.add((fault.path, fault.edit.line))
        left = [each for each in left if (each.path, each.edit.line) not in lines]
        yield fault


def read_equivalents(path: Path) -> dict[Key, str]:
    """The faults of a list, with the reason of each. The head of the file gives the form of a row.

    Raises:
        ValueError: a row is not of this form, or lacks its reason.
    """
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    rows = {}
    for block in filter(None, (each.strip("\n") for each in re.split(r"\n\s*\n", text))):
        match = re.fullmatch(r"(\S+) (\S+) (\S+)\n- (.*)\n\+ (.*)\n((?:  .*\n?)+)", block)
        if match is None:
            raise ValueError(f"{path}: this row is not of the form that the head of the file gives:\n{block}")
        *key, reason = match.groups()
        rows[Key(*key)] = " ".join(reason.split())
    return rows


def stale(equivalents: Mapping[Key, str], faults: Iterable[Fault]) -> list[Key]:
    """Rows that name no fault of today's sources."""
    known = {fault.key for fault in faults}
    return [key for key in equivalents if key not in known]
