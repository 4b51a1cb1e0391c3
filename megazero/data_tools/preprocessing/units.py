"""Units of work: parts of the inputs whose datasets are written separately, on any machine, and then merged.

A unit is a range of bytes of a plain file (the lines that begin in it), a run of row groups of a table, or
whole files, several where they are small. Its name is a hash of what its bytes depend on: each file's path as
given, its size and its time of modification, the ranges, the settings, the tokenizer's files, the versions of
the libraries that tokenize, and the sources of this package that make the bytes. So a unit that was made of
anything else is never taken for it, and one that is whole is kept, whoever made it.

A folder of units holds the plan of a run: its settings and its units in the order of the input. A unit's
files are datasets, and `NAME.json`, which is written last and says that they are whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from megazero.data.cache import cache_key
from megazero.data.files import whole_file
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_tools.cli import Shard
from megazero.data_tools.preprocessing.chunks import FileSegment
from megazero.data_tools.preprocessing.encode import EncodeJob
from megazero.data_tools.preprocessing.inputs import is_table, kind_of, size_of
from megazero.data_tools.preprocessing.pipeline import PreprocessRun, join_files, require_documents
from megazero.data_tools.preprocessing.progress import RunTotals
from megazero.data_tools.preprocessing.tables import groups_of
from megazero.errors import DataError
from megazero.regular_file import read_regular

_FORMAT = "megazero-units-1"
_SOURCES = ("data/tokenizers", "data/indexed", "data_tools/preprocessing")
_LIBRARIES = ("tokenizers", "sentencepiece", "regex", "sentencex")


@dataclass(frozen=True)
class WorkUnit:
    """A unit: its name, its nominal segments in the order of the input, and their bytes."""

    name: str
    segments: tuple[FileSegment, ...]
    bytes: int

    def __str__(self) -> str:
        first = self.segments[0]
        part = f"{first.path}" if first.end is None else f"{first.path} from {first.start} to {first.end}"
        return part if len(self.segments) == 1 else f"{part} and {len(self.segments) - 1} more files"


@dataclass(frozen=True)
class UnitPlan:
    """The units of a run in the order of the input, the endings of its outputs by key, and its settings."""

    settings: dict[str, Any]
    outputs: dict[str, str]
    units: tuple[WorkUnit, ...]

    @classmethod
    def of(cls, run: PreprocessRun, unit_bytes: int) -> UnitPlan:
        """Plan a run. Raises DataError for files that cannot be read."""
        settings = {**_settings(run.job), "max-line": run.longest_line, "unit": unit_bytes}
        units = []
        for segments, size in _grouped(run.paths, unit_bytes):
            parts = [[*_identity(part.path), part.start, part.end] for part in segments]
            units.append(WorkUnit(cache_key({"settings": settings, "parts": parts})[:24], segments, size))
        outputs = {key: prefix[len(run.prefix) :] for key, prefix in run.outputs().items()}
        return cls(settings, outputs, tuple(units))

    @classmethod
    def load(cls, path: Path) -> UnitPlan:
        """Read a plan. Raises DataError if it is none."""
        try:
            content = json.loads(read_regular(path))
            if content["format"] != _FORMAT:
                raise ValueError("unknown format")
            units = (
                WorkUnit(name, tuple(FileSegment(*part) for part in parts), size)
                for name, parts, size in content["units"]
            )
            return cls(content["settings"], content["outputs"], tuple(units))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"`{path}` must be the plan of units, but is not ({error}); delete it."
            ) from error

    def to_json(self) -> str:
        """The plan as JSON, the same on every machine."""
        units = [
            [unit.name, [[part.path, part.start, part.end] for part in unit.segments], unit.bytes]
            for unit in self.units
        ]
        content = {"settings": self.settings, "outputs": self.outputs, "units": units}
        return json.dumps({"format": _FORMAT, **content}, indent=1, sort_keys=True)

    def share(self, shard: Shard) -> list[WorkUnit]:
        """The units of a shard: those whose middle byte lies in its share of all bytes."""
        total, before, share = sum(unit.bytes for unit in self.units), 0, []
        for unit in self.units:
            middle = 2 * before + unit.bytes
            if min(middle * shard.shards // max(2 * total, 1), shard.shards - 1) == shard.number:
                share.append(unit)
            before += unit.bytes
        return share


class UnitFolder:
    """The folder of a run's units. Raises DataError if it holds units of another run.

    `is_exact` says whether the fast encoder had been wrong on a text of some unit when the folder was opened;
    then all units are made by the tokenizer itself, under other names.
    """

    def __init__(self, path: str | Path, plan: UnitPlan):
        self.path, self.plan = Path(path), plan
        self.is_exact = (self.path / "exact.json").exists()
        self._refuse_others()

    @classmethod
    def existing(cls, path: str | Path) -> UnitFolder:
        """The folder of units that were made elsewhere. Raises DataError unless it holds one plan."""
        plans = sorted(Path(path).glob("plan-*.json"))
        if not plans:
            raise DataError(f"`{path}` must be a folder of units, but holds no plan; name another folder.")
        return cls(path, UnitPlan.load(plans[0]))

    def store_plan(self) -> None:
        """Write the plan, so that the units can be merged without the inputs."""
        with whole_file(self._plan_path()) as file:
            file.write(self.plan.to_json().encode())

    def _plan_path(self) -> Path:
        digest = hashlib.blake2b(self.plan.to_json().encode(), digest_size=8).hexdigest()
        return self.path / f"plan-{digest}.json"

    def _refuse_others(self) -> None:
        own = self._plan_path()
        for path in sorted(self.path.glob("plan-*.json")):
            if path == own:
                continue
            other = UnitPlan.load(path)
            names = sorted({*other.settings, *self.plan.settings})
            different = [name for name in names if other.settings.get(name) != self.plan.settings.get(name)]
            if different:
                raise DataError(
                    f"`{self.path}` must hold the units of one run, but {path.name} is of one with another "
                    f"{' and '.join(f'`{name}`' for name in different)}; give the same flags, or delete the "
                    "folder."
                )
            raise DataError(
                f"`{self.path}` must hold the units of one run, but {path.name} is of one with other inputs; "
                "delete that file to go on with these, which keeps the units of files that are the same."
            )

    def refuse_fast(self, reason: str) -> None:
        """Remember that the fast encoder was wrong."""
        with whole_file(self.path / "exact.json") as file:
            file.write(json.dumps({"reason": reason}).encode())

    def base(self, unit: WorkUnit) -> str:
        """The start of the names of a unit's files."""
        return str(self.path / unit.name[:2] / f"{unit.name}{'-exact' if self.is_exact else ''}")

    def prefixes(self, unit: WorkUnit) -> list[str]:
        """The prefixes of a unit's datasets, by key."""
        return [f"{self.base(unit)}{ending}" for ending in self.plan.outputs.values()]

    def missing(self, units: Sequence[WorkUnit]) -> list[WorkUnit]:
        """The units that are not whole, each once."""
        wanted = {unit.name: unit for unit in units if not os.path.exists(f"{self.base(unit)}.json")}
        return list(wanted.values())

    def finish(self, unit: WorkUnit, totals: RunTotals) -> None:
        """Write down that the files of a unit are whole."""
        with whole_file(f"{self.base(unit)}.json") as file:
            file.write(totals.to_json().encode())

    def merge(self, prefix: str, bad_lines: str | None) -> RunTotals:
        """Join all units in the order of the input. DataError if one is missing; then nothing is written."""
        missing = self.missing(self.plan.units)
        if missing:
            raise DataError(
                f"`{self.path}` must hold all {len(self.plan.units):,} units, but lacks {len(missing):,}, "
                f"such as that of {missing[0]}; run the shards again, which keeps what is whole."
            )
        totals = RunTotals.empty(self.plan.outputs)
        with ExitStack() as stack:
            sources = [self.prefixes(unit) for unit in self.plan.units]
            for unit in self.plan.units:
                totals.join(RunTotals.of(json.loads(read_regular(f"{self.base(unit)}.json"))))
            require_documents(totals)
            for ending, names in zip(self.plan.outputs.values(), zip(*sources, strict=True), strict=True):
                dtype = open_indexed(names[0]).dtype
                writer = stack.enter_context(IndexedDatasetWriter(f"{prefix}{ending}", dtype))
                for name in names:
                    writer.append_dataset(name)
            if bad_lines is not None:
                bad = stack.enter_context(whole_file(bad_lines))
                listed = [f"{self.base(unit)}.bad" for unit in self.plan.units]
                join_files(bad, [path for path in listed if os.path.exists(path)])
        return totals


def _grouped(paths: Sequence[str], unit_bytes: int) -> Iterator[tuple[tuple[FileSegment, ...], int]]:
    """Divide files into units: large ones by themselves, small ones together."""
    small: list[FileSegment] = []
    total = 0
    for path in paths:
        size, kind = size_of(path), kind_of(path)
        if small and (size >= unit_bytes or total >= unit_bytes):
            yield tuple(small), total
            small, total = [], 0
        if size < unit_bytes:
            small.append(FileSegment(path))
            total += size
            continue
        steps = -(-size // unit_bytes) if kind == "plain" or is_table(kind) else 1
        count = groups_of(path, kind) if is_table(kind) else steps * unit_bytes
        steps = max(1, min(steps, count))
        ends = [count * step // steps for step in range(steps + 1)] if steps > 1 else [0, None]
        for start, end in pairwise(ends):
            yield (FileSegment(path, start or 0, end),), size // steps
    if small:
        yield tuple(small), total


def _identity(path: str) -> tuple[str, int, int]:
    state = os.stat(path)
    return path, state.st_size, state.st_mtime_ns


def _settings(job: EncodeJob) -> dict[str, Any]:
    """The things that a unit's bytes depend on besides the input, named as users know them."""
    spec = asdict(job.spec)
    for name in ("vocab_file", "merge_file", "model"):
        spec[name] = None if spec[name] is None else _content(Path(spec[name]))
    folder = Path(__file__).parents[2]
    code = hashlib.blake2b(digest_size=16)
    for path in sorted(path for room in _SOURCES for path in folder.glob(f"{room}/*.py")):
        code.update(path.read_bytes())
    return {
        "tokenizer": cache_key(spec),
        "json-keys": list(job.keys),
        "append-eod": job.append_eod,
        "on-bad-line": "skip" if job.skip_bad_lines else "stop",
        "split-sentences": None if job.sentences is None else asdict(job.sentences),
        "code": code.hexdigest(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }


def _content(path: Path) -> str:
    """A hash of a tokenizer's file or folder; a name on a hub is itself."""
    if not path.exists():
        return str(path)
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path.glob("*.json")) + sorted(path.glob("*.model")) if path.is_dir() else [path]:
        digest.update(read_regular(file))
    return digest.hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
