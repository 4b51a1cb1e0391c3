"""Show the progress of a run: a bar on a terminal, else lines, and a table at the end."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import IO, Any

from megazero.data_tools.preprocessing.encode import KEPT_PROBLEMS, EncodedChunk, EncodedColumn
from megazero.data_tools.preprocessing.inputs import STDIN, kind_of, size_of


@dataclass
class KeyTotals:
    """The counts of one key so far; `single` counts documents with one sequence, `empty` dropped ones."""

    documents: int = 0
    single: int = 0
    empty: int = 0
    sequences: int = 0
    tokens: int = 0

    def add(self, column: EncodedColumn) -> None:
        """Add the documents of a chunk."""
        self.documents += column.documents
        self.single += column.single
        self.empty += column.empty
        self.sequences += len(column.lengths)
        self.tokens += len(column.tokens)


@dataclass
class RunTotals:
    """The counts of a run so far, per key and per input line."""

    keys: dict[str, KeyTotals]
    lines: int = 0
    bytes: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    first_problems: list[str] = field(default_factory=list)

    @classmethod
    def empty(cls, keys: Iterable[str]) -> RunTotals:
        """The totals before the first chunk."""
        return cls({key: KeyTotals() for key in keys})

    @classmethod
    def of(cls, content: dict[str, Any]) -> RunTotals:
        """The totals that `to_json` has written."""
        keys = {key: KeyTotals(**counts) for key, counts in content["keys"].items()}
        return cls(**{**content, "keys": keys, "problems": Counter(content["problems"])})

    def to_json(self) -> str:
        """The totals as JSON."""
        keys = {key: asdict(counts) for key, counts in self.keys.items()}
        return json.dumps({**vars(self), "keys": keys})

    def join(self, other: RunTotals) -> None:
        """Add the totals of a part that follows."""
        self.lines += other.lines
        self.bytes += other.bytes
        self.problems += other.problems
        self.first_problems = (self.first_problems + other.first_problems)[:KEPT_PROBLEMS]
        for key, counts in other.keys.items():
            for count in fields(counts):
                total = getattr(self.keys[key], count.name) + getattr(counts, count.name)
                setattr(self.keys[key], count.name, total)

    def add(self, chunk: EncodedChunk) -> None:
        """Add a chunk."""
        self.lines += chunk.lines
        self.bytes += chunk.bytes
        self.problems += chunk.problem_counts
        for totals, column in zip(self.keys.values(), chunk.columns, strict=True):
            totals.add(column)


class ProgressDisplay:
    """Shows totals while they grow: a bar on a terminal, else a line every `interval` documents."""

    def __init__(self, paths: Sequence[str], interval: int, stream: IO[str] | None = None):
        self.started = time.perf_counter()
        stream = sys.stderr if stream is None else stream
        self._interval, self._next, self._stream = interval, interval, stream
        self._bar = None
        if stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bars

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Bars(*columns, console=Console(file=stream), transient=True)
            # A compressed file unpacks to an unknown number of bytes.
            known = all(path != STDIN and kind_of(path) == "plain" for path in paths)
            size = sum(map(size_of, paths)) if known else None
            self._task = self._bar.add_task("preprocess", total=size)

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, totals: RunTotals) -> None:
        """Show the totals after a chunk."""
        if self._bar is not None:
            self._bar.update(self._task, completed=totals.bytes)
            return
        done = max((key.documents for key in totals.keys.values()), default=0)
        if done >= self._next:
            self._next = done - done % self._interval + self._interval
            speed = totals.bytes / 1e6 / max(self.seconds(), 1e-9)
            tokens = sum(key.tokens for key in totals.keys.values())
            print(f"{done:,} documents, {tokens:,} tokens, {speed:.1f} MB/s", file=self._stream, flush=True)

    def seconds(self) -> float:
        """The seconds since the start."""
        return time.perf_counter() - self.started


def print_table(
    totals: RunTotals, outputs: dict[str, str], encoder: str, seconds: float, *, sentences: bool
) -> None:
    """Print the final summary on standard output; with `sentences`, also counts of sentences."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{totals.lines:,} lines, encoded by {encoder}")
    columns = {"documents": "documents", "tokens": "tokens", "empty (dropped)": "empty"}
    if sentences:
        columns |= {"sentences": "sequences", "of one sentence": "single"}
    for name in ("output", *columns):
        table.add_column(name, justify="left" if name == "output" else "right", overflow="fold")
    for key, prefix in outputs.items():
        table.add_row(prefix, *(f"{getattr(totals.keys[key], count):,}" for count in columns.values()))
    console = Console(file=sys.stdout)
    console.print(table)
    speed = totals.bytes / 1e6 / max(seconds, 1e-9)
    print(f"{totals.bytes / 1e6:,.1f} MB of input in {seconds:.1f} s: {speed:,.1f} MB/s")
    short = sum(key.single for key in totals.keys.values())
    if sentences and short:
        print(f"{short:,} documents of one sentence give no samples to BERT's binary head, which needs two.")
    print_skipped(totals)


def print_skipped(totals: RunTotals) -> None:
    """Print the lines that `--on-bad-line skip` left out: the number by reason, and the first few lines."""
    if not totals.problems:
        return
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(totals.problems.items()))
    print(f"skipped {totals.problems.total():,} lines ({reasons}); the first:", file=sys.stderr)
    for problem in totals.first_problems:
        print(f"  {problem}", file=sys.stderr)
