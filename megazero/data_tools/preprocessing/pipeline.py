"""Run a conversion: encode chunks into an indexed dataset per key; all are whole, or none is visible."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO

from megazero.data.files import temporary_path, whole_file
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_tools.preprocessing.chunks import (
    CHUNK_BYTES,
    LONGEST_LINE,
    FileSegment,
    JsonlChunk,
    cut,
    divide,
    lines_before,
)
from megazero.data_tools.preprocessing.encode import KEPT_PROBLEMS, EncodedChunk, EncodeJob, EncoderFacts
from megazero.data_tools.preprocessing.inputs import STDIN, is_table, kind_of, library
from megazero.data_tools.preprocessing.parsing import Problem
from megazero.data_tools.preprocessing.pool import EncoderPool, InlinePool, WorkerPool
from megazero.data_tools.preprocessing.progress import ProgressDisplay, RunTotals
from megazero.data_tools.preprocessing.watch import PATIENCE, WorkerPatience
from megazero.errors import DataError


@dataclass(frozen=True)
class Workers:
    """The processes that encode: their number, a multiple of `partitions`, and the patience with them."""

    count: int = 1
    partitions: int = 1
    patience: WorkerPatience = PATIENCE


@dataclass(frozen=True)
class PreprocessRun:
    """The inputs and settings of a run.

    `log_interval` is in documents, `longest_line` in bytes.
    """

    paths: tuple[str, ...]
    prefix: str
    job: EncodeJob
    workers: Workers = Workers()
    log_interval: int = 100_000
    chunk_bytes: int = CHUNK_BYTES
    longest_line: int = LONGEST_LINE

    def pool(self) -> EncoderPool:
        """Start the processes that encode a partition; this process alone is enough for one worker."""
        workers = self.workers
        if any(is_table(kind_of(path)) for path in self.paths):
            library("pyarrow", "pyarrow", "--input")  # before the fork, so that not every worker imports it
        if workers.count == 1:
            return InlinePool(self.job)
        return WorkerPool(self.job, workers.count // workers.partitions, self.chunk_bytes, workers.patience)

    def chunks(self, sources: Sequence[str | FileSegment]) -> Iterator[JsonlChunk]:
        """Cut sources into chunks."""
        job = self.job
        return cut(sources, self.chunk_bytes, self.longest_line, goes_on=job.skip_bad_lines, keys=job.keys)

    def outputs(self) -> dict[str, str]:
        """The dataset prefix of each key, named as in Megatron."""
        level = "document" if self.job.sentences is None else "sentence"
        return {key: f"{self.prefix}_{key}_{level}" for key in self.job.keys}


@dataclass(frozen=True)
class PreprocessResult:
    """The totals of a finished run, its encoder's name, and its seconds."""

    totals: RunTotals
    encoder: str
    seconds: float


class Disagreement(Exception):
    """The fast encoder was wrong on a text; the run starts again without it."""


def preprocess(run: PreprocessRun, bad_lines: str | None = None) -> PreprocessResult:
    """Carry out a run; the output does not depend on the numbers of workers and partitions.

    `bad_lines` is a file that the skipped lines are listed in. Raises DataError for bad lines (unless
    skipped), an unfit tokenizer, a killed worker or a full disk, and then leaves no output.
    """
    # `--workers` alone decides how many cores are used, and no library may have threads at a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    progress = ProgressDisplay(run.paths, run.log_interval)
    try:
        totals, encoder = _attempt(run, progress, bad_lines)
    except Disagreement as disagreement:
        if STDIN in run.paths:
            raise DataError(
                "`--input` must be files for this tokenizer, but is standard input, which cannot be read "
                f"again where {disagreement}."
            ) from disagreement
        print(f"note: {disagreement}; starting again with the slower tokenizer itself.", file=sys.stderr)
        totals, encoder = _attempt(replace(run, job=replace(run.job, fast=False)), progress, bad_lines)
    return PreprocessResult(totals, encoder, progress.seconds())


def _attempt(run: PreprocessRun, progress: ProgressDisplay, bad_lines: str | None) -> tuple[RunTotals, str]:
    tally = Tally(run.job.keys, progress)
    encoder = (_in_one if run.workers.partitions == 1 else _in_parts)(run, tally, bad_lines)
    return tally.totals, encoder


def _in_one(run: PreprocessRun, tally: Tally, bad_lines: str | None) -> str:
    """Encode all inputs by one pool; returns the encoder's name."""
    with ExitStack() as stack:
        workers = stack.enter_context(run.pool())
        say_if_slow(workers.facts)
        # Started after the workers, because the bar draws on a thread, and a process with threads cannot
        # fork.
        stack.enter_context(tally.progress)
        writers = open_writers(stack, run.outputs().values(), workers.facts)
        bad = _open_bad_lines(stack, bad_lines)
        tally.totals.first_problems = write(run, workers, run.paths, writers, tally, bad)
        require_documents(tally.totals)
    return workers.facts.encoder


def _in_parts(run: PreprocessRun, tally: Tally, bad_lines: str | None) -> str:
    """Encode each part by a pool of its own into its own datasets, all at the same time; then append these.

    Returns the encoder's name.
    """
    parts = divide(run.paths, run.workers.partitions)
    with ExitStack() as stack:
        pools = [stack.enter_context(run.pool()) for _ in parts]
        facts = pools[0].facts
        say_if_slow(facts)
        writers = open_writers(stack, run.outputs().values(), facts)
        # Named like a temporary file of the first output, so that the next run removes a killed run's
        # remains.
        folder = temporary_path(next(iter(run.outputs().values())), ".parts")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        threads = stack.enter_context(ThreadPoolExecutor(len(parts)))
        # Exits run in reverse order: workers end, then the threads that wait for them, then their files go.
        for pool in pools:
            stack.push(pool)
        stack.enter_context(tally.progress)
        prefixes = [[f"{folder}/{number}-{key}" for key in run.job.keys] for number in range(len(parts))]
        rows = zip(pools, parts, prefixes, strict=True)
        futures = [threads.submit(_write_part, run, *row, tally) for row in rows]
        done = wait(futures, return_when=FIRST_EXCEPTION).done
        failed = [future for future in futures if future in done and future.exception() is not None]
        for future in failed or futures:
            tally.totals.first_problems += future.result()
        del tally.totals.first_problems[KEPT_PROBLEMS:]
        require_documents(tally.totals)
        for names in prefixes:
            for writer, name in zip(writers, names, strict=True):
                writer.append_dataset(name)
        bad = _open_bad_lines(stack, bad_lines)
        if bad is not None:
            join_files(bad, [f"{names[0]}.bad" for names in prefixes])
    return facts.encoder


def _write_part(
    run: PreprocessRun,
    pool: EncoderPool,
    part: list[FileSegment],
    prefixes: list[str],
    tally: Tally,
) -> list[str]:
    with ExitStack() as stack:
        writers = open_writers(stack, prefixes, pool.facts)
        bad = _open_bad_lines(stack, f"{prefixes[0]}.bad")
        return write(run, pool, part, writers, tally, bad)


def _open_bad_lines(stack: ExitStack, path: str | None) -> IO[bytes] | None:
    return None if path is None else stack.enter_context(whole_file(path))


def join_files(target: IO[bytes], paths: Iterable[str]) -> None:
    """Copy files to the end of another."""
    for path in paths:
        with open(path, "rb") as source:
            shutil.copyfileobj(source, target)


def open_writers(
    stack: ExitStack, prefixes: Iterable[str], facts: EncoderFacts
) -> list[IndexedDatasetWriter]:
    """Open a writer for each prefix."""
    return [stack.enter_context(IndexedDatasetWriter(prefix, facts.dtype)) for prefix in prefixes]


def write(
    run: PreprocessRun,
    pool: EncoderPool,
    sources: Sequence[str | FileSegment],
    writers: list[IndexedDatasetWriter],
    tally: Tally,
    bad: IO[bytes] | None,
) -> list[str]:
    """Encode sources into the writers, one per key, and list bad lines in a file, if there is one.

    Returns descriptions of the first skipped lines.
    """
    skipped: list[str] = []
    first = next((source for source in sources if isinstance(source, FileSegment)), None)
    for chunk, first_line in _with_line_numbers(pool.results(run.chunks(sources)), first):
        if chunk.disagreement is not None:
            facts = pool.facts
            raise Disagreement(f"{facts.fast} and {facts.tokenizer} differ in {chunk.disagreement}")
        problems = [
            f"{chunk.path}, {chunk.item} {first_line + problem.line}: {problem.reason}: {problem.detail}"
            for problem in chunk.problems
        ]
        if problems and not run.job.skip_bad_lines:
            remedy = f"correct the {chunk.item} or pass `--on-bad-line skip`"
            if chunk.problem_counts.total() == tally.totals.lines + chunk.lines > 1:
                lines = f"{chunk.lines:,} {chunk.item}s"
                remedy = f"none of the first {lines} can be used, so look at `--json-keys` and the file"
            raise DataError(f"{problems[0]}; {remedy}.")
        skipped += problems[: KEPT_PROBLEMS - len(skipped)]
        if bad is not None:
            bad.writelines(_listed(chunk, first_line, problem) for problem in chunk.problems)
        for writer, column in zip(writers, chunk.columns, strict=True):
            writer.add_raw(column.tokens, column.lengths, column.document_lengths)
        tally.add(chunk)
    return skipped


def _listed(chunk: EncodedChunk, first_line: int, problem: Problem) -> bytes:
    """A bad line as a line of the file that sets them aside."""
    row = {"file": chunk.path, "line": first_line + problem.line}
    return json.dumps({**row, "reason": problem.reason, "detail": problem.detail}).encode() + b"\n"


class Tally:
    """The totals of a run, to which any thread may add, and their display.

    The totals of a unit are also added to those of its run, `whole`.
    """

    def __init__(self, keys: tuple[str, ...], progress: ProgressDisplay, whole: Tally | None = None):
        self.totals = RunTotals.empty(keys)
        self.progress = progress
        self._whole = whole
        self._lock = threading.Lock()

    def add(self, chunk: EncodedChunk) -> None:
        """Add a chunk, and show the totals."""
        with self._lock:
            self.totals.add(chunk)
            if self._whole is None:
                self.progress.show(self.totals)
        if self._whole is not None:
            self._whole.add(chunk)


def say_if_slow(facts: EncoderFacts) -> None:
    """Print why no fast encoder is used, if the user can change that."""
    if facts.reason is not None:
        print(f"note: encoding with the slower {facts.tokenizer} itself: {facts.reason}.", file=sys.stderr)


def require_documents(totals: RunTotals) -> None:
    """Raise DataError if a key has no documents."""
    for key, counts in totals.keys.items():
        if not counts.documents:
            raise DataError(
                f"`--input` must hold at least one document under key `{key}`, but holds none in "
                f"{totals.lines} lines ({totals.problems.total()} skipped); nothing was written."
            )


def _with_line_numbers(
    chunks: Iterator[EncodedChunk], first: FileSegment | None
) -> Iterator[tuple[EncodedChunk, int]]:
    """Yield each chunk with the number, from 1, of its first line in its file.

    If the chunks begin with a segment `first` in the middle of a file, the lines before it are counted only
    when a chunk has a problem, and its line must be named.
    """
    path, line = None, 1
    unknown = first if first is not None and first.start else None
    for number, chunk in enumerate(chunks):
        if number and chunk.path != path:
            line, unknown = 1, None
        path = chunk.path
        if unknown is not None and chunk.problems:
            line, unknown = line + lines_before(unknown), None
        yield chunk, line
        line += chunk.lines
